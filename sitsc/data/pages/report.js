"use strict";
// Tooltips: the page says the same without them, in titles and tables.
(() => {
  const tip = document.getElementById("tip");
  const texts = new Map();
  let shown = null, keyed = false;  // the mark, and whether keys and not the pointer chose it

  function hide() {
    if (shown) shown.classList.remove("on");
    shown = null;
    tip.classList.remove("on");
  }

  function show(mark, x, y) {
    if (mark !== shown) {
      hide();
      shown = mark;
      mark.classList.add("on");
      tip.textContent = texts.get(mark);
      tip.classList.add("on");
    }
    const wide = tip.offsetWidth, high = tip.offsetHeight;
    const left = Math.min(x + 14, innerWidth - wide - 8);
    const below = y + 18 + high < innerHeight;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (below ? y + 18 : Math.max(8, y - high - 14)) + "px";
  }

  function showBeside(mark) {
    const box = (mark.querySelector(".shape") || mark).getBoundingClientRect();
    show(mark, box.left + box.width / 2, box.bottom - 14);
  }

  for (const chart of document.querySelectorAll("svg.chart")) {
    const marks = [...chart.querySelectorAll(".mark")];
    for (const mark of marks) {
      const title = mark.querySelector("title");
      texts.set(mark, title.textContent);
      mark.setAttribute("role", "img");
      mark.setAttribute("aria-label", title.textContent);
      title.remove();
    }
    if (!marks.length) continue;
    let at = -1;
    chart.tabIndex = 0;
    chart.addEventListener("pointermove", (event) => {
      const mark = event.target.closest(".mark");
      keyed = false;
      if (!mark) return hide();
      at = marks.indexOf(mark);
      show(mark, event.clientX, event.clientY);
    });
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("blur", hide);
    chart.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") hide();
      if (!move) return;
      event.preventDefault();
      at = Math.min(marks.length - 1, Math.max(0, at + move));
      keyed = true;
      marks[at].scrollIntoView({ block: "nearest" });
      showBeside(marks[at]);
    });
  }
  addEventListener("scroll", () => {
    if (shown && keyed) showBeside(shown);
    else hide();
  }, { passive: true });
})();
