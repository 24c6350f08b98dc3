"use strict";
(() => {
  const drawn = new Set();
  let figures = {};

  const inflate = (id) => {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
  };

  // Only the style sheet defines colours. A text that begins with -- is the name of a colour.
  const coloured = (item, style) => {
    if (typeof item === "string") return item.startsWith("--") ? style.getPropertyValue(item).trim() : item;
    if (Array.isArray(item)) {
      return item.some((entry) => typeof entry === "string" || typeof entry === "object") ? item.map((entry) => coloured(entry, style)) : item;
    }
    if (item === null || typeof item !== "object") return item;
    return Object.fromEntries(Object.entries(item).map(([name, value]) =>
      [name, ["text", "ticktext", "name"].includes(name) ? value : coloured(value, style)]));
  };

  const draw = (div) => {
    const style = getComputedStyle(document.documentElement);
    const figure = figures[div.id];
    const layout = coloured(figure.layout, style);
    layout.font.family = getComputedStyle(document.body).fontFamily;
    drawn.add(div);
    // The bar of buttons is off: it would cover titles and legends, and one of its buttons sends the figure to a server.
    return Plotly.react(div, coloured(figure.data, style), layout, {responsive: true, displayModeBar: false});
  };

  // A figure is drawn shortly before it becomes visible, so that a long report opens as fast as a short one.
  const watch = () => {
    const seen = new IntersectionObserver((entries) => {
      for (const {isIntersecting, target} of entries) {
        if (!isIntersecting) continue;
        seen.unobserve(target);
        // When a figure grows, Plotly does not move the legend to its new rows, so it would cover the curves.
        draw(target).then(() => target.on("plotly_relayout", ({autosize}) => { if (autosize) Plotly.redraw(target); }));
      }
    }, {rootMargin: "400px"});
    for (const div of document.querySelectorAll(".plot")) seen.observe(div);
  };

  const key = (cell) => {
    const text = cell.dataset.value ?? cell.textContent.trim();
    return text === "" ? null : Number.isNaN(Number(text)) ? text : Number(text);
  };

  const compare = (a, b) => {
    if (a === null || b === null) return (a === null) - (b === null);  // Missing values come last in both directions.
    return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  };

  const sort = (table, head) => {
    const descending = head.ariaSort === "ascending";
    for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
    head.ariaSort = descending ? "descending" : "ascending";
    const rows = [...table.tBodies[0].rows].map((row) => [key(row.cells[head.cellIndex]), row]);
    const sign = descending ? -1 : 1;
    rows.sort(([a], [b]) => a === null || b === null ? compare(a, b) : sign * compare(a, b));
    table.tBodies[0].append(...rows.map(([, row]) => row));
  };

  for (const table of document.querySelectorAll(".sortable")) {
    for (const head of table.tHead.rows[0].cells) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      button.addEventListener("click", () => sort(table, head));
      head.append(button);
    }
  }

  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const area = document.createElement("textarea");  // navigator.clipboard is not available for pages opened from files.
      area.value = button.dataset.copy;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
      button.textContent = "Copied";
    });
  }

  const again = () => { for (const div of drawn) draw(div); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  matchMedia("print").addEventListener("change", again);
  addEventListener("beforeprint", () => { for (const div of document.querySelectorAll(".plot")) draw(div); });

  (async () => {
    const [script, texts] = await Promise.all([inflate("plotly"), inflate("figures")]);
    figures = JSON.parse(texts);
    const element = document.createElement("script");
    element.textContent = script;
    document.head.append(element);
    watch();
    document.documentElement.dataset.ready = "";
  })().catch((error) => {
    for (const div of document.querySelectorAll(".plot")) div.textContent = `This browser cannot draw the figure: ${error}`;
  });
})();
