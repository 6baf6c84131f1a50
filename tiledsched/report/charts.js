// Draws each chart at the width that the page has, in its colours, light or dark.
const dark = matchMedia("(prefers-color-scheme: dark)");
const labels = 280, narrow = 700;
const fitted = (spec, room) => {
  if (spec.columns) {
    const panel = spec.spec.width.step ? 215 : spec.spec.width + 30;
    spec.columns = Math.max(1, Math.min(spec.columns, Math.floor((room - 60) / panel)));
  }
  if (typeof spec.width == "number" && room < narrow)
    spec.width = Math.max(150, Math.min(spec.width, room - 190));
  else if (typeof spec.width == "number")
    spec.width = Math.min(spec.width, room - labels);
  return spec;
};
// A chart that cannot be drawn says so in its place, and does not keep the others from being drawn.
const failed = (place, error) => { place.textContent = `This chart could not be drawn: ${error.message}`; console.error(error); };
const drawn = () => {
  const text = getComputedStyle(document.body).color, line = dark.matches ? "#3a4048" : "#e3e6ea";
  const words = {labelColor: text, titleColor: text};
  const config = {
    axis: {...words, gridColor: line, domainColor: line, tickColor: line},
    legend: words, header: words, text: {color: text}, view: {stroke: line},
  };
  for (const one of document.querySelectorAll(".chart[data-spec]")) {
    try {
      const spec = fitted(JSON.parse(document.getElementById(one.dataset.spec).textContent), one.clientWidth);
      const legend = one.clientWidth < narrow ? {...words, orient: "bottom", columns: 1} : words;
      vegaEmbed(one, {...spec, background: null, config: {...config, legend}},
                {actions: {export: true, source: false, compiled: false, editor: false}, renderer: "svg"})
        .catch(error => failed(one, error));
    } catch (error) { failed(one, error); }
  }
};
dark.addEventListener("change", drawn);
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth != width) { width = innerWidth; drawn(); } });
drawn();
