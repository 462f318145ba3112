// Before anything is painted: the theme that was chosen here last, or the system's.
(() => {
  "use strict";
  let chosen = null;
  try {
    chosen = localStorage.getItem("bitdraft.theme");
  } catch {
    // storage is switched off: the system decides
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
