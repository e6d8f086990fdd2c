// Before anything is painted: the theme that was chosen, so that a dark page does not flash white.
try {
  const theme = localStorage.getItem("coalign.theme");
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
} catch {
  // without storage the system's theme counts
}
