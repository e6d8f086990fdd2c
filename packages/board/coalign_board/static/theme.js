// Before anything is painted: the theme that was chosen, so that a dark page does not flash white.
const systemTheme = matchMedia("(prefers-color-scheme: dark)");

/** Mark the page as dark if that was chosen, or if nothing was and the system is dark. */
function applyTheme() {
  const root = document.documentElement;
  root.toggleAttribute("data-dark", root.dataset.theme ? root.dataset.theme === "dark" : systemTheme.matches);
}

try {
  const theme = localStorage.getItem("coalign.theme");
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
} catch {
  // without storage the system's theme counts
}
applyTheme();
systemTheme.addEventListener("change", applyTheme);
