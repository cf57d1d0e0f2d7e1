// Type a line, and see the two fast matrices of the gated network fill, and answer.

import { drawMatrix, largest, oneAtATime, perCent } from "./draw.js";
import { GatedReader } from "./networks.js";

const TOKEN = /S\(([a-h]{2,4}),([a-h])\),|Q\([a-h]{2,4}\)[a-h]\./g;
const QUESTION = /Q\([a-h]{2,4}\)$/;
const MILLISECONDS = 160; // a character, when it plays
const byId = (id) => document.getElementById(id);

export function showLine(reader) {
  const line = byId("line");
  const slider = byId("moment");
  let text = ""; // the line that was read: what stands in the field may already be another
  let moments = [];
  let timer = null;

  const readLine = oneAtATime(async () => {
    const typed = line.value;
    const wrong = [...typed].find((character) => !GatedReader.vocabulary.includes(character));
    const known = "it knows a to h, S, Q, brackets, comma, full stop and space.";
    byId("line-error").textContent = wrong === undefined ? "" : `The network has never seen “${wrong}”: ${known}`;
    if (wrong !== undefined) return;
    moments = await reader.read(typed);
    text = typed;
    slider.max = text.length; // first, as it bounds the value
    slider.value = text.length;
    showCharacters();
    await showMoment();
  });

  const showMoment = oneAtATime(async () => {
    const place = Number(slider.value);
    const before = text.slice(0, place);
    for (const [index, cell] of [...byId("characters").children].entries()) {
      cell.classList.toggle("read", index < place);
      cell.classList.toggle("last", index === place - 1);
    }
    slider.setAttribute("aria-valuetext", place ? `${place}, up to ${before.slice(-9)}` : "0");
    showMatrices(place);
    byId("line-answer").textContent = answerAt(place);
    await showStored(before);
  });

  /** Each character in a cell: above it how much it changes the second matrix, below it the answer. */
  function showCharacters() {
    const matrices = moments.map(({ state }) => state.fast_2.data);
    const changes = matrices.slice(1).map((matrix, index) => distance(matrix, matrices[index]));
    const limit = Math.max(...changes, 1e-6);
    const cells = [...text].map((character, index) => {
      const cell = document.createElement("span");
      const bar = cell.appendChild(document.createElement("i"));
      bar.style.blockSize = `${(100 * changes[index]) / limit}%`;
      cell.appendChild(document.createElement("b")).textContent = character;
      cell.appendChild(document.createElement("em")).textContent = best(moments[index + 1].probabilities);
      cell.addEventListener("click", () => choose(index + 1));
      return cell;
    });
    byId("characters").replaceChildren(...cells);
  }

  function showMatrices(place) {
    for (const [id, name] of [["fast-1", "fast_1"], ["fast-2", "fast_2"]]) {
      // One scale for all moments of a line: one that grew with the matrix would hide its filling.
      const limit = Math.max(...moments.map(({ state }) => largest(state[name].data))) || 1;
      const [, rows, columns] = GatedReader.shapes[name];
      drawMatrix(byId(id), moments[place].state[name].data, rows, columns, limit);
    }
  }

  function answerAt(place) {
    if (!QUESTION.test(text.slice(0, place))) return place ? "Nothing is asked here." : "Nothing has been read.";
    const { probabilities } = moments[place];
    return `It answers ${best(probabilities)}: ${perCent(Math.max(...probabilities))}`;
  }

  async function showStored(before) {
    const tokens = [...before.matchAll(TOKEN)];
    const end = tokens.length ? tokens.at(-1).index + tokens.at(-1)[0].length : 0;
    const stored = new Map(tokens.filter(([, key]) => key).map(([, key, value]) => [key, value]));
    const rows = [];
    const moment = moments[end]; // what is typed meanwhile changes them
    for (const [key, value] of stored) {
      const probabilities = await reader.ask(key, moment);
      const probability = probabilities[GatedReader.values.indexOf(value)];
      const row = byId("stored-row").content.cloneNode(true).firstElementChild;
      row.querySelector(".name").textContent = `${key} → ${value}`;
      row.querySelector("meter").value = probability;
      row.querySelector("meter").setAttribute("aria-label", `Probability that ${key} is answered by ${value}`);
      row.querySelector(".per-cent").textContent = perCent(probability);
      rows.push(row);
    }
    byId("stored").replaceChildren(...rows);
    byId("stored-empty").hidden = rows.length > 0;
  }

  function choose(place) {
    stop();
    slider.value = place;
    showMoment();
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    byId("play").textContent = "Play";
  }

  function play() {
    if (timer !== null) return stop();
    if (slider.value === slider.max) slider.value = 0;
    byId("play").textContent = "Pause";
    timer = setInterval(() => {
      if (slider.value === slider.max) return stop();
      slider.valueAsNumber += 1;
      showMoment();
    }, MILLISECONDS);
  }

  line.addEventListener("input", () => {
    stop();
    readLine();
  });
  slider.addEventListener("input", () => {
    stop();
    showMoment();
  });
  byId("play").addEventListener("click", play);
  for (const button of document.querySelectorAll("[data-line]")) {
    button.addEventListener("click", () => {
      stop();
      line.value = button.dataset.line;
      readLine();
    });
  }
  readLine();
}

function best(probabilities) {
  return GatedReader.vocabulary[probabilities.indexOf(Math.max(...probabilities))];
}

function distance(numbers, others) {
  return Math.hypot(...numbers.map((number, index) => number - others[index]));
}
