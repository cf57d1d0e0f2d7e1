// What both parts of the page share: pictures of matrices, per cent, and work of which only the newest counts.

const PLUS = [232, 89, 12];
const MINUS = [28, 126, 214];

/** Draw numbers [rows * columns] as pixels: orange above zero, blue below, clear at zero, by their square root. */
export function drawMatrix(canvas, numbers, rows, columns, limit) {
  [canvas.height, canvas.width] = [rows, columns];
  const pixels = new ImageData(columns, rows);
  numbers.forEach((number, index) => {
    pixels.data.set([...(number < 0 ? MINUS : PLUS), 255 * Math.sqrt(Math.min(1, Math.abs(number) / limit))], 4 * index);
  });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

/** Draw ink [size * size] of 0 to 1 in a colour, on nothing. */
export function drawInk(canvas, ink, size, colour) {
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d");
  context.fillStyle = colour;
  ink.forEach((strength, index) => {
    context.globalAlpha = strength;
    context.fillRect(index % size, Math.floor(index / size), 1, 1);
  });
}

export function largest(numbers) {
  return numbers.reduce((most, number) => Math.max(most, Math.abs(number)), 0);
}

export function perCent(probability) {
  const rounded = Math.round(100 * probability);
  return `${rounded} %`;
}

/** Return a function that runs `work`, never twice at once; what is asked for meanwhile is done once, afterwards. */
export function oneAtATime(work) {
  let running = null;
  let again = false;
  return () => {
    if (running) {
      again = true;
      return running;
    }
    running = (async () => {
      try {
        do {
          again = false;
          await work();
        } while (again);
      } finally {
        running = null;
      }
    })();
    return running;
  };
}
