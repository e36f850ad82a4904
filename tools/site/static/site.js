// A formula in a line of text that is wider than its box scrolls in a box of its own.
const wide = () => document.querySelectorAll("article mjx-container:not([display])").forEach(formula => {
  formula.classList.remove("wide");
  const box = formula.closest("p, li, td, th, dd, h1, h2, h3, h4, summary");
  formula.classList.toggle("wide", box !== null && formula.getBoundingClientRect().width > box.clientWidth);
});
window.addEventListener("load", () => window.MathJax?.startup?.promise?.then(wide));
window.addEventListener("resize", wide);
