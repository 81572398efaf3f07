// The pointer over curves, and boxes that hide runs. Panels are made by the command; texts are only set as texts.
"use strict";

// Values of a picture's lines at the step under the pointer.
function pointAt(event) {
  const figure = event.target.closest("figure");
  const svg = figure && figure.querySelector("svg");
  if (!svg || !svg.contains(event.target)) return leave();
  const data = JSON.parse(figure.querySelector("script").textContent);
  const box = svg.getBoundingClientRect();
  const [left, right] = data.plot.map((share) => share * box.width);
  const share = Math.min(1, Math.max(0, (event.clientX - box.left - left) / (right - left)));
  const wanted = data.x[0] + share * (data.x[1] - data.x[0]);
  const shown = data.lines.filter((line) => line.x.length && !document.body.classList.contains("hide-" + line.run));
  if (!shown.length) return leave();
  const nearest = shown.map((line) => nearestIndex(line.x, wanted));
  const steps = shown.map((line, index) => line.x[nearest[index]]);
  const step = steps.reduce((best, other) => (Math.abs(other - wanted) < Math.abs(best - wanted) ? other : best));
  // A line that has no point there, of another run or of held-out rows, has no value there.
  const reach = (3 * (data.x[1] - data.x[0])) / (right - left);
  const output = figure.querySelector("output");
  output.textContent = "";
  output.append(label(Number(step.toFixed(2)) + ":"));
  shown.forEach((line, index) => {
    if (Math.abs(steps[index] - step) > reach) return;
    const value = line.y[nearest[index]] + (data.unit ? " " + data.unit : "");
    const text = label((line.eval ? "held out " : "") + value);
    const colour = document.createElement("i");
    colour.className = "colour run-" + (line.run % 8);
    text.prepend(colour);
    output.append(text);
  });
  let cursor = figure.querySelector(".cursor");
  if (!cursor) {
    cursor = document.createElement("div");
    cursor.className = "cursor";
    figure.append(cursor);
  }
  const at = left + ((step - data.x[0]) / (data.x[1] - data.x[0])) * (right - left);
  cursor.style.left = box.left - figure.getBoundingClientRect().left + at + "px";
  cursor.style.top = box.top - figure.getBoundingClientRect().top + "px";
  cursor.style.height = box.height * 0.85 + "px";
  leave(figure);
  cursor.style.display = "block";
  current = figure;
}

let current = null;

function leave(next) {
  if (!current || current === next) return;
  const cursor = current.querySelector(".cursor");
  if (cursor) cursor.style.display = "none";
  current.querySelector("output").textContent = "";
  current = null;
}

function label(text) {
  const span = document.createElement("span");
  span.textContent = text;
  return span;
}

function nearestIndex(sorted, wanted) {
  let [low, high] = [0, sorted.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle;
    else high = middle;
  }
  return wanted - sorted[low] < sorted[high] - wanted ? low : high;
}

document.addEventListener("pointermove", pointAt);
document.addEventListener("pointerdown", pointAt);
document.addEventListener("change", (event) => {
  const run = event.target.dataset.run;
  if (run) document.body.classList.toggle("hide-" + run, !event.target.checked);
});
