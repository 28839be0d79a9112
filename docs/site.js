// On phones tables with sentences become cards: each cell is below the heading of its column (site.css).
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const rows = [...table.tBodies[0]?.rows ?? []];
  if (!rows.some(row => [...row.cells].slice(1).some(cell => cell.textContent.length > 40))) continue;
  table.dataset.cards = "";
  const names = [...table.tHead.rows[0].cells].map(cell => cell.textContent.trim());
  for (const row of rows) [...row.cells].forEach((cell, i) => { if (i) cell.dataset.name = names[i]; });
}
