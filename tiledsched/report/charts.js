// Draws charts at the width that the page has, in its colours, light or dark; each is drawn once its place is to be seen.
const dark = matchMedia("(prefers-color-scheme: dark)");
const paper = {background: "white", font: "DejaVu Sans, sans-serif"};
const read = id => JSON.parse(document.getElementById(id).textContent);
const colours = () => {
  const text = getComputedStyle(document.body).color, line = dark.matches ? "#3a4048" : "#e3e6ea";
  const words = {labelColor: text, titleColor: text};
  return {
    axis: {...words, gridColor: line, domainColor: line, tickColor: line}, legend: words, header: words,
    title: {color: text, subtitleColor: text}, text: {color: text}, rule: {color: text}, view: {stroke: line},
  };
};
// Text in lines that the room holds.
const wrapped = (text, letters) => [text].flat().flatMap(line => line.split(" ").reduce((lines, word) => {
  const last = lines[lines.length - 1];
  if (last && (last + " " + word).length <= letters) lines[lines.length - 1] += " " + word; else lines.push(word);
  return lines;
}, []));
// Panels side by side as the room allows, and legends below where it is narrow.
const fitted = (spec, room) => {
  const found = structuredClone(spec), narrow = room < 560;
  if (found.columns) {
    const panel = found.spec.width.step ? found.spec.width.step * (found.panelColumns || 3) + 42 : found.spec.width + 45;
    found.columns = Math.max(1, Math.min(found.columns, Math.floor((room - 20) / panel)));
  }
  delete found.panelColumns;
  if (found.width == "container") found.autosize = {type: "fit-x", contains: "padding"};
  if (found.title?.text) found.title = {
    ...found.title, text: wrapped(found.title.text, room / 8), subtitle: wrapped(found.title.subtitle || [], room / 6.6)};
  if (typeof found.width == "number") found.width = Math.max(140, Math.min(found.width, room - (narrow ? 150 : 280)));
  return [found, narrow ? {legend: {orient: "bottom", columns: 1, labelLimit: room - 60}} : {}];
};
const failed = (place, error) => { place.textContent = `This chart could not be drawn: ${error.message}`; console.error(error); };
// Links that save a chart as on white paper, whatever the page's colours.
const savers = (spec, name) => {
  const links = document.createElement("div");
  links.className = "save";
  for (const kind of ["SVG", "PNG"]) {
    const link = document.createElement("a");
    link.textContent = kind;
    link.href = "#";
    link.title = `save as ${kind}`;
    link.onclick = async event => {
      event.preventDefault();
      const width = spec.width == "container" ? {width: 560} : {};
      const {view} = await vegaEmbed(document.createElement("div"), {...spec, ...width}, {actions: false, config: paper});
      const made = document.createElement("a");
      made.href = await view.toImageURL(kind.toLowerCase(), kind == "PNG" ? 2 : 1);
      made.download = `${name}.${kind.toLowerCase()}`;
      made.click();
      view.finalize();
    };
    links.append(link);
  }
  return links;
};
const draw = async (place, spec, name) => {
  try {
    place.view?.finalize();
    const [shown, more] = fitted(spec, place.clientWidth);
    const config = colours();
    const own = {...shown, background: null, config: {...config, legend: {...config.legend, ...more.legend}}};
    const result = await vegaEmbed(place, own, {actions: false, renderer: "svg"});
    place.view = result.view;
    const {panelColumns, ...whole} = spec;
    place.append(savers(whole, name));
    place.dataset.drawn = "yes";
  } catch (error) { failed(place, error); }
};
const waiting = new IntersectionObserver(seen => {
  for (const {isIntersecting, target} of seen) if (isIntersecting) { waiting.unobserve(target); target.draw(); }
}, {rootMargin: "600px"});
const whenSeen = (place, drawing) => { place.draw = drawing; waiting.observe(place); };
for (const place of document.querySelectorAll(".chart[data-spec]"))
  whenSeen(place, () => draw(place, read(place.dataset.spec), place.dataset.spec.replace(/^chart-/, "")));

// Views of one case at a time, chosen by its values.
for (const section of document.querySelectorAll(".explorer")) {
  const {first, views, cases, shared, texts} = read(section.dataset.cases);
  const rowsOf = columns => {
    const names = Object.keys(columns);
    const lists = names.map(name => columns[name].texts ? columns[name].texts.map(at => texts[at]) : columns[name]);
    return names.length ? lists[0].map((_, at) => Object.fromEntries(names.map((name, place) => [name, lists[place][at]]))) : [];
  };
  const choices = section.querySelector(".choices"), selects = {};
  const titles = [...new Set(cases.flatMap(one => Object.keys(one.values)))];
  const ordered = values => values.sort((a, b) => parseFloat(a) - parseFloat(b) || (a < b ? -1 : a > b ? 1 : 0));
  const numeric = values => values.every(value => !isNaN(parseFloat(value)));
  let current = cases[first];
  const show = chosen => {
    current = chosen;
    for (const [title, select] of Object.entries(selects)) select.value = chosen.values[title] ?? "";
    section.querySelector(".lead").innerHTML = chosen.lead;
    for (const figure of section.querySelectorAll(".view")) {
      const {heading, spec, main} = views[figure.dataset.view], place = figure.querySelector(".chart");
      const data = Object.fromEntries(Object.entries(chosen.rows).map(
        ([name, rows]) => [name, rowsOf(typeof rows == "string" ? shared[rows] : rows)]));
      figure.querySelector(".note").innerHTML = chosen.notes[figure.dataset.view] || "";
      const empty = !data[main].length;
      figure.classList.toggle("empty", empty);
      delete place.dataset.drawn;
      if (empty) { place.view?.finalize(); place.view = null; place.textContent = heading; continue; }
      const title = {text: heading, subtitle: [chosen.title, chosen.source], anchor: "start", offset: 12};
      const name = `${figure.dataset.view}-${chosen.title}`.replace(/\W+/g, "_");
      waiting.unobserve(place);
      whenSeen(place, () => draw(place, {...spec, title, datasets: data}, name));
    }
  };
  for (const title of titles) {
    const values = [...new Set(cases.map(one => one.values[title] ?? ""))];
    if (values.length < 2) continue;
    const label = document.createElement("label"), select = document.createElement("select");
    for (const value of numeric(values) ? ordered(values) : values) select.append(new Option(value || "-", value));
    // Of the cases with the value chosen, the one that is most like the last.
    select.onchange = () => {
      const alike = one => titles.filter(each => one.values[each] == current.values[each]).length;
      const found = cases.filter(one => (one.values[title] ?? "") == select.value);
      show(found.reduce((best, one) => alike(one) > alike(best) ? one : best));
    };
    label.append(title, select);
    choices.append(label);
    selects[title] = select;
  }
  show(current);
}
const again = () => document.querySelectorAll(".chart").forEach(place => { if (place.draw && place.dataset.drawn) whenSeen(place, place.draw); });
dark.addEventListener("change", again);
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth != width) { width = innerWidth; again(); } });
