// Before the first paint, so that nothing flashes: the theme chosen here last time, else the system's.
// A script of its own, and no module: those run after the page is drawn.
(function () {
  let chosen = null;
  try {
    chosen = localStorage.getItem("shardmq.theme");
  } catch {
    // Storage may be forbidden; the system's theme it is.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
