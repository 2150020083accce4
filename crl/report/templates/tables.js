"use strict";
// Sort tables by a click on a heading, and filter their rows by a text. Print everything.
window.addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
for (const table of document.querySelectorAll("table.data:not(.sorted)")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const key = (row) => {
        const cell = row.cells[column];
        const text = cell.dataset.value ?? cell.textContent.trim();
        const number = Number(text);
        return text !== "" && !Number.isNaN(number) ? number : text;
      };
      const compare = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if (typeof x === "number" && typeof y === "number") return x - y;
        if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
        return x.localeCompare(y);
      };
      const rows = [...body.rows].sort(compare);
      body.append(...(descending ? rows.reverse() : rows));
    });
  });
  const field = document.querySelector(`input[data-filter="${table.id}"]`);
  if (field) {
    field.closest(".filter").hidden = false;
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
  }
}
