// Runs before the first paint, so that the page never flashes in the wrong colours.
(function () {
  var chosen = null;
  try {
    chosen = localStorage.getItem("monitor.theme");
  } catch (error) {
    // storage may be forbidden; the system's preference is used
  }
  var dark = matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark";
  document.documentElement.dataset.theme = chosen === "light" || chosen === "dark" ? chosen : dark;
})();
