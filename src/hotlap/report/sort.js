"use strict";
for (const table of document.querySelectorAll("table[data-sorts]")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, at) => head.querySelector("button").addEventListener("click", () => {
    const rises = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach((one) => one.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", rises ? "ascending" : "descending");
    const of = (row) => {
      const cell = row.cells[at];
      return "n" in cell.dataset ? Number(cell.dataset.n) : null;
    };
    const rows = [...table.tBodies[0].rows];
    rows.sort((one, other) => {
      const [a, b] = [of(one), of(other)];
      if (a !== null && b !== null) return rises ? a - b : b - a;
      if (a !== null || b !== null) return a !== null ? -1 : 1;
      const [s, t] = [one.cells[at].textContent.trim(), other.cells[at].textContent.trim()];
      return rises ? s.localeCompare(t) : t.localeCompare(s);
    });
    table.tBodies[0].append(...rows);
  }));
}
