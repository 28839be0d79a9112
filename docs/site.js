// On phones tables with sentences or long headings become cards: each cell is below the heading of its column (site.css).
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const rows = [...table.tBodies[0]?.rows ?? []];
  const names = [...table.tHead.rows[0].cells].map(cell => cell.textContent.trim());
  const isWide = names.join("").length > 60 || rows.some(row => [...row.cells].slice(1).some(cell => cell.textContent.length > 40));
  if (!isWide) continue;
  table.dataset.cards = "";
  for (const row of rows) [...row.cells].forEach((cell, i) => { if (i) cell.dataset.name = names[i]; });
}
