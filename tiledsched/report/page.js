// Tables that are filtered by words, and links into what is folded.
for (const input of document.querySelectorAll("input.filter")) input.addEventListener("input", () => {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of input.parentElement.querySelectorAll("tbody tr")) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
  }
});
const open = () => {
  const to = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const folded = to && to.closest("details");
  if (folded) { folded.open = true; to.scrollIntoView(); }
};
addEventListener("hashchange", open);
open();
