// Receives panels that have changed, and puts them into their rooms in order.
"use strict";

const panels = new Map();
const note = document.getElementById("note");
// Names of the runs that are not shown: a run's number changes when another comes before it.
const hidden = new Set();

document.addEventListener("change", (event) => {
  const { run, name } = event.target.dataset;
  if (run) hidden[event.target.checked ? "delete" : "add"](name);
});

function place(update) {
  for (const { id, room, html } of update.changed) {
    let panel = panels.get(id);
    if (!panel) {
      panel = document.createElement("div");
      panel.className = "panel";
      panel.dataset.panel = id;
      panels.set(id, panel);
    }
    const open = new Map();
    panel.querySelectorAll("details").forEach((details) => open.set(details.dataset.key, details.open));
    // Whatever comes from data was escaped where the panel was made.
    panel.innerHTML = html;
    panel.querySelectorAll("details").forEach((details) => {
      if (open.has(details.dataset.key)) details.open = open.get(details.dataset.key);
    });
    panel.querySelectorAll("[data-run]").forEach((box) => {
      box.checked = !hidden.has(box.dataset.name);
      document.body.classList.toggle("hide-" + box.dataset.run, !box.checked);
    });
    panel.room = room;
  }
  const order = new Set(update.order);
  for (const [id, panel] of panels) {
    if (!order.has(id)) {
      panel.remove();
      panels.delete(id);
    }
  }
  const last = new Map();
  for (const id of update.order) {
    const panel = panels.get(id);
    const room = document.querySelector('[data-room="' + panel.room + '"]');
    const before = last.get(room) ? last.get(room).nextSibling : room.firstChild;
    if (panel !== before) room.insertBefore(panel, before);
    last.set(room, panel);
  }
  document.title = update.title;
  document.body.dataset.updates = Number(document.body.dataset.updates || 0) + 1;
}

const source = new EventSource("events");
source.onopen = () => {
  note.textContent = "live";
  note.className = "";
};
source.onmessage = (event) => {
  const began = performance.now();
  place(JSON.parse(event.data));
  document.body.dataset.milliseconds = (performance.now() - began).toFixed(1);
};
source.onerror = () => {
  note.textContent = "the server has ended; this is what was known then";
  note.className = "lost";
};
