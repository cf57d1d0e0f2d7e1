// A pad to draw on with a mouse, a finger, a pen or the arrow keys, and the pixels that the network takes of it.

const FINE = 4; // times the network's pixels: strokes are drawn so large, then averaged over each pixel
const STROKE = 5 / 105; // of the side: the width of Omniglot's strokes
const MARGIN = 1.5; // the side of what is cut out, in those of its ink, as image_files.py cuts scans
const LEAST = 0.2; // of the pad: a dot stays small
const STEP = 1 / 40; // of the pad, of an arrow key

export class Pad {
  #canvas;
  #changed;
  #strokes = []; // each a list of points [x, y] from 0 to 1
  #drawing = false; // the pointer is down
  #pen = null; // where the arrow keys' pen is, { x, y, down }

  /** changed() is called whenever the drawing has changed. */
  constructor(canvas, changed) {
    [this.#canvas, this.#changed] = [canvas, changed];
    canvas.addEventListener("pointerdown", (event) => {
      if (!event.isPrimary || event.button !== 0) return; // a second finger, or the button of a menu
      canvas.setPointerCapture(event.pointerId);
      this.#drawing = true;
      this.#pen = null;
      this.#strokes.push([this.#place(event)]);
      this.#redraw();
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.#drawing || !event.isPrimary) return;
      const events = event.getCoalescedEvents?.() ?? [];
      this.#strokes.at(-1).push(...(events.length ? events : [event]).map((each) => this.#place(each)));
      this.#redraw();
    });
    for (const kind of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(kind, (event) => (this.#drawing &&= !event.isPrimary));
    }
    canvas.addEventListener("keydown", (event) => this.#press(event));
    canvas.addEventListener("blur", () => {
      this.#pen = null;
      this.#paint();
    });
    new ResizeObserver(() => this.#paint()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#paint());
  }

  get empty() {
    return this.#strokes.length === 0;
  }

  clear() {
    this.#strokes = [];
    if (this.#pen) this.#pen.down = false;
    this.#redraw();
  }

  /** The ink as the network has learnt to see it, [size * size] of 0 to 1: cut out with a margin, in thin strokes. */
  ink(size) {
    const points = this.#strokes.flat();
    const [left, top] = [0, 1].map((axis) => Math.min(...points.map((point) => point[axis])));
    const [right, bottom] = [0, 1].map((axis) => Math.max(...points.map((point) => point[axis])));
    const side = MARGIN * Math.max(right - left, bottom - top, LEAST);
    const fine = FINE * size;
    const context = new OffscreenCanvas(fine, fine).getContext("2d", { willReadFrequently: true });
    context.lineWidth = STROKE * fine;
    const scale = ([x, y]) => [
      fine * ((x - (left + right) / 2) / side + 1 / 2),
      fine * ((y - (top + bottom) / 2) / side + 1 / 2),
    ];
    for (const stroke of this.#strokes) trace(context, stroke.map(scale));
    const { data } = context.getImageData(0, 0, fine, fine);
    const ink = new Float32Array(size * size);
    for (let y = 0; y < fine; y++) {
      for (let x = 0; x < fine; x++) {
        ink[Math.floor(y / FINE) * size + Math.floor(x / FINE)] += data[4 * (y * fine + x) + 3] / 255 / FINE ** 2;
      }
    }
    return ink;
  }

  #place(event) {
    const box = this.#canvas.getBoundingClientRect();
    const inside = (number) => Math.min(1, Math.max(0, number));
    return [inside((event.clientX - box.left) / box.width), inside((event.clientY - box.top) / box.height)];
  }

  #press(event) {
    const directions = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const direction = directions[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || !(direction || event.key === " ")) return;
    event.preventDefault();
    const pen = (this.#pen ??= { x: 0.5, y: 0.5, down: false });
    if (event.key === " ") {
      pen.down = !pen.down;
      if (pen.down) this.#strokes.push([[pen.x, pen.y]]);
    } else {
      const step = event.shiftKey ? 4 * STEP : STEP;
      pen.x = Math.min(1, Math.max(0, pen.x + step * direction[0]));
      pen.y = Math.min(1, Math.max(0, pen.y + step * direction[1]));
      if (pen.down) this.#strokes.at(-1).push([pen.x, pen.y]);
    }
    if (pen.down) this.#redraw();
    else this.#paint();
  }

  #redraw() {
    this.#paint();
    this.#changed();
  }

  #paint() {
    const side = Math.round(this.#canvas.clientWidth * devicePixelRatio);
    this.#canvas.width = this.#canvas.height = side; // which clears it
    const context = this.#canvas.getContext("2d");
    const style = getComputedStyle(this.#canvas);
    context.strokeStyle = context.fillStyle = style.color;
    context.lineWidth = side / 40;
    for (const stroke of this.#strokes) trace(context, stroke.map(([x, y]) => [side * x, side * y]));
    if (this.#pen) {
      const { x, y, down } = this.#pen;
      context.strokeStyle = context.fillStyle = style.accentColor;
      context.lineWidth = 2 * devicePixelRatio;
      context.beginPath();
      context.arc(side * x, side * y, side / 40, 0, 2 * Math.PI);
      context.stroke();
      if (down) context.fill();
    }
  }
}

function trace(context, points) {
  context.lineCap = context.lineJoin = "round";
  context.beginPath();
  context.moveTo(...points[0]);
  for (const point of points) context.lineTo(...point); // to the first too: a dot is a line to itself
  context.stroke();
}
