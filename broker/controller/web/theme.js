// Sets the theme that was chosen last, else the system's, before the first paint, so that nothing flashes.
// This is no module, as modules run after the page is drawn.
(function () {
  let chosen = null;
  try {
    chosen = localStorage.getItem("shardmq.theme");
  } catch {
    // Without storage the system's theme is used.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
