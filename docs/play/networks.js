// The two networks, in onnxruntime-web. Their fast weights are inputs of the graphs (export.py), so that the page sees
// all that is written, and takes back what it likes.

import * as ort from "./built/ort.wasm.bundle.min.mjs";

ort.env.wasm.numThreads = 1; // more would need headers that a static host does not send
ort.env.wasm.wasmPaths = { wasm: new URL("built/ort-wasm-simd-threaded.wasm", import.meta.url).href };

const load = (name) => ort.InferenceSession.create(new URL(`built/${name}.onnx`, import.meta.url).href);
const tensor = (numbers, ...shape) => new ort.Tensor("float32", numbers, shape);

export const facts = await (await fetch(new URL("built/networks.json", import.meta.url))).json();

export function softmax(logits) {
  const most = Math.max(...logits);
  const powers = Array.from(logits, (logit) => Math.exp(logit - most));
  const sum = powers.reduce((total, power) => total + power, 0);
  return powers.map((power) => power / sum);
}

/** The few-shot classifier of Munkhdalai & Trischler 2018: M = sum_i k_i y_i^T, one column of M a class. */
export class FewShotClassifier {
  static size = 28; // pixels of a side
  static width = 64; // numbers in a key
  static most = facts.classes;

  #session;
  #examples = []; // { name, ink, key }, in the order in which they were taught

  constructor(session) {
    this.#session = session;
  }

  static async load() {
    return new FewShotClassifier(await load("classifier"));
  }

  get examples() {
    return [...this.#examples];
  }

  /** The names of the classes, in the order of the columns of M. */
  get classes() {
    return [...new Set(this.#examples.map(({ name }) => name))];
  }

  /** M, [width * most] by rows. All classes count alike: each column is the mean of its examples' keys. */
  get memory() {
    const { most, width } = FewShotClassifier;
    const memory = new Float32Array(width * most);
    for (const [column, name] of this.classes.entries()) {
      const keys = this.#examples.filter((example) => example.name === name).map(({ key }) => key);
      for (let row = 0; row < width; row++) {
        memory[row * most + column] = keys.reduce((sum, key) => sum + key[row], 0) / keys.length;
      }
    }
    return memory;
  }

  /** The key of a drawing, and the probability of each class; ink: [size * size] of 0, paper, to 1. */
  async predict(ink) {
    const { most, size, width } = FewShotClassifier;
    const images = tensor(Float32Array.from(ink), 1, 1, size, size);
    const { keys, logits } = await this.#session.run({ images, memory: tensor(this.memory, width, most) });
    return { key: keys.data, probabilities: softmax(logits.data.slice(0, this.classes.length)) };
  }

  /** Bind a drawing to a name, which may be new. */
  async teach(name, ink) {
    if (this.classes.length === FewShotClassifier.most && !this.classes.includes(name)) {
      throw new RangeError(`the network has columns for ${FewShotClassifier.most} signs`);
    }
    const { key } = await this.predict(ink);
    this.#examples.push({ name, ink, key });
  }

  /** Take back the last example: M is as it was, bit for bit, because it is computed from those that are left. */
  undo() {
    return this.#examples.pop();
  }

  forgetAll() {
    this.#examples = [];
  }
}

/** The gated fast weights of Schlag & Schmidhuber 2017, which write both matrices at every character. */
export class GatedReader {
  static shapes = { hidden: [1, 40], slow_hidden: [1, 40], fast_1: [1, 40, 56], fast_2: [1, 40, 41] };
  static vocabulary = facts.vocabulary;
  static values = facts.vocabulary.slice(0, 8); // a to h

  #session;
  #line = "";
  #moments;

  constructor(session) {
    this.#session = session;
    const zeros = Object.entries(GatedReader.shapes).map(([name, shape]) => {
      return [name, tensor(new Float32Array(shape.reduce((product, side) => product * side)), ...shape)];
    });
    this.#moments = [{ state: Object.fromEntries(zeros), probabilities: null }];
  }

  static async load() {
    return new GatedReader(await load("gated"));
  }

  /** The moments of a line: before its first character, and after each. Only what has changed is read anew. */
  async read(line) {
    let kept = 0;
    while (kept < line.length && line[kept] === this.#line[kept]) kept++;
    const moments = this.#moments.slice(0, kept + 1);
    for (const character of line.slice(kept)) moments.push(await this.#step(character, moments.at(-1)));
    [this.#line, this.#moments] = [line, moments];
    return moments;
  }

  /** The probabilities of a to h as the answer, if a key were asked for at a moment, which stays as it is. */
  async ask(key, moment) {
    for (const character of `Q(${key})`) moment = await this.#step(character, moment);
    return moment.probabilities.slice(0, GatedReader.values.length);
  }

  async #step(character, { state }) {
    const index = BigInt64Array.of(BigInt(GatedReader.vocabulary.indexOf(character)));
    const results = await this.#session.run({ character: new ort.Tensor("int64", index, [1]), ...state });
    const after = Object.keys(GatedReader.shapes).map((name) => [name, results[`${name}_after`]]);
    return { state: Object.fromEntries(after), probabilities: softmax(results.logits.data) };
  }
}
