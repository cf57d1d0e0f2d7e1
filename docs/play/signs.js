// Draw signs, teach them, undo them: the few-shot classifier and its fast matrix.

import { drawInk, drawMatrix, largest, oneAtATime, perCent } from "./draw.js";
import { FewShotClassifier, facts } from "./networks.js";
import { Pad } from "./pad.js";

const { most, size, width } = FewShotClassifier;
const byId = (id) => document.getElementById(id);

export function showSigns(classifier) {
  const pad = new Pad(byId("pad"), () => update());
  const name = byId("new-name");

  /** Predict what is drawn, and show it beside the matrix. */
  const update = oneAtATime(async () => {
    const drawn = pad.empty ? null : await classifier.predict(pad.ink(size));
    showAnswer(drawn);
    showMatrix(drawn);
  });

  async function teach(label) {
    if (pad.empty) {
      byId("sign-answer").textContent = "Draw a sign first.";
      return;
    }
    if (classifier.classes.length === FewShotClassifier.most && !classifier.classes.includes(label)) {
      byId("sign-answer").textContent = `It has room for ${FewShotClassifier.most} signs: undo one, or forget all.`;
      return;
    }
    await classifier.teach(label, pad.ink(size));
    pad.clear();
    name.value = nextName(classifier.classes);
    await update();
  }

  function undo() {
    classifier.undo();
    name.value = nextName(classifier.classes);
    update();
  }

  function showAnswer(drawn) {
    const { classes } = classifier;
    const best = drawn && classes.length > 1 ? drawn.probabilities.indexOf(Math.max(...drawn.probabilities)) : -1;
    const chosen = best < 0 ? null : `This is ${classes[best]}: ${perCent(drawn.probabilities[best])}`;
    const ready = classes.length > 1 ? "Draw one of your signs." : "Two signs, and it will tell them apart.";
    byId("sign-answer").textContent = chosen ?? ready;
  }

  function showMatrix(drawn) {
    const { classes, examples, memory } = classifier;
    const limit = Math.max(largest(memory), drawn ? largest(drawn.key) : 0) || 1;
    byId("key-row").hidden = !drawn;
    if (drawn) drawMatrix(byId("key"), drawn.key, 1, width, limit);
    const rows = classes.map((label, column) => {
      const row = byId("class-row").content.cloneNode(true).firstElementChild;
      row.querySelector(".name").textContent = label;
      for (const { ink } of examples.filter((example) => example.name === label)) {
        const picture = row.querySelector(".examples").appendChild(document.createElement("canvas"));
        drawInk(picture, ink, size, getComputedStyle(document.body).color);
      }
      const probability = drawn && classes.length > 1 ? drawn.probabilities[column] : null;
      const meter = row.querySelector("meter");
      meter.value = probability ?? 0;
      meter.setAttribute("aria-label", `Probability of ${label}`);
      row.querySelector(".per-cent").textContent = probability === null ? "" : perCent(probability);
      const button = row.querySelector("button");
      button.textContent = "Teach";
      button.setAttribute("aria-label", `Teach the drawing as ${label}`);
      button.disabled = !drawn;
      button.addEventListener("click", () => teach(label));
      const strip = row.querySelector(".strip");
      strip.setAttribute("aria-label", `Column of the fast matrix for ${label}`);
      const numbers = memory.filter((_, index) => index % most === column);
      drawMatrix(strip, numbers, 1, width, limit);
      return row;
    });
    byId("classes").replaceChildren(...rows);
    byId("memory-empty").hidden = classes.length > 0;
    byId("forget-all").disabled = byId("undo").disabled = examples.length === 0;
    byId("undo").textContent = examples.length ? `Undo ${examples.at(-1).name}` : "Undo";
  }

  byId("teach-new").addEventListener("submit", (event) => {
    event.preventDefault();
    name.value = name.value.trim(); // spaces alone are no name
    if (name.reportValidity()) teach(name.value);
  });
  byId("clear-pad").addEventListener("click", () => pad.clear());
  byId("undo").addEventListener("click", undo);
  byId("forget-all").addEventListener("click", () => {
    classifier.forgetAll();
    name.value = nextName([]);
    update();
  });
  byId("teach-letters").addEventListener("click", async () => {
    for (const { name, ink } of facts.letters) await classifier.teach(name, ink.map((level) => level / 255));
    update();
  });
  addEventListener("keydown", (event) => {
    const undone = (event.ctrlKey || event.metaKey) && !event.shiftKey && event.key === "z";
    if (!undone || event.target.matches("input") || byId("undo").disabled) return;
    event.preventDefault();
    undo();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => update());
  name.value = nextName([]);
  update();
}

/** The first letter that no sign has as its name. */
function nextName(classes) {
  return [..."ABCDEFGHIJKLMNOPQRSTUVWXYZ"].find((letter) => !classes.includes(letter)) ?? "";
}
