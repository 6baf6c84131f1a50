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
const draw = async (place, spec, name, picked) => {
  try {
    place.view?.finalize();
    const [shown, more] = fitted(spec, place.clientWidth);
    const config = colours();
    if (picked) delete shown.title?.subtitle;  // the page says it above; a picture that is saved says it itself
    const own = {...shown, background: null, config: {...config, legend: {...config.legend, ...more.legend}}};
    const result = await vegaEmbed(place, own, {actions: false, renderer: "svg"});
    place.view = result.view;
    if (picked) place.view.addEventListener("click", (event, item) => { if (item?.datum?.at != null) picked(item.datum); });
    const {panelColumns, ...whole} = spec;
    place.append(savers(whole, name));
    place.dataset.drawn = "yes";
  } catch (error) { failed(place, error); }
};
// With ?all every chart is drawn at once, as for printing; else each once its place is to be seen.
const atOnce = location.search == "?all";
const waiting = new IntersectionObserver(seen => {
  for (const {isIntersecting, target} of seen) if (isIntersecting) { waiting.unobserve(target); target.draw(); }
}, {rootMargin: "600px"});
const whenSeen = (place, drawing) => { place.draw = drawing; if (atOnce) drawing(); else waiting.observe(place); };
// Rows from the columns that the file holds.
const unpacked = ({rows, columns}, texts) => {
  const names = Object.keys(columns);
  const lists = names.map(name => {
    const {same, of, at, width, texts: places} = columns[name];
    return Array.isArray(columns[name]) ? columns[name] : of ? at.match(RegExp(`.{${width}}`, "g")).map(digits => of[parseInt(digits, 36)]) :
      places ? places.map(place => texts[place]) : Array(rows).fill(same);
  });
  return Array.from({length: rows}, (_, at) => Object.fromEntries(names.map((name, place) => [name, lists[place][at]])));
};
for (const place of document.querySelectorAll(".chart[data-spec]")) {
  const spec = read(place.dataset.spec);
  if (spec.data?.packed) spec.data = {values: unpacked(spec.data.packed, spec.data.texts)};
  whenSeen(place, () => draw(place, spec, place.dataset.spec.replace(/^chart-/, "")));
}

const KNOB = "k:", shown = value => value === true ? "yes" : value === false ? "no" : String(value);
const knobsOf = row => Object.keys(row).filter(name => name.startsWith(KNOB) && row[name] != null);
const schedule = row => Object.fromEntries(knobsOf(row).map(name => [name.slice(KNOB.length), row[name]]));
const quoted = value => `'${JSON.stringify(value).replaceAll("'", "'\\''")}'`;
// The squares of the map of two knobs, as the report's own code makes them for the two that it begins with.
const squares = (programs, [first, second]) => {
  const found = new Map();
  for (const row of programs) {
    const rows = shown(row[first]), columns = shown(row[second]), key = `${rows} ${columns}`;
    const best = found.get(key);
    if (best) { best.programs++; best.mark = [best.mark, row.mark].sort((a, b) => MARKS.indexOf(b) - MARKS.indexOf(a))[0]; }
    else found.set(key, {rows, columns, relative: row.relative, us: row.us, at: row.at, mark: row.mark, programs: 1});
  }
  return [...found.values()].map(each => ({...each, said: each.relative.toFixed(2) + (each.programs < FEWEST ? "?" : "")}));
};
const FEWEST = 4, MARKS = ["", "tie", "best", "served"];
const element = (name, text = "", parts = []) => {
  const made = document.createElement(name);
  made.textContent = text;
  made.append(...parts);
  return made;
};

// Views of one case at a time, chosen by its values.
for (const section of document.querySelectorAll(".explorer")) {
  const {first, views, cases, shared, texts} = read(section.dataset.cases);
  const part = name => section.querySelector(`.${name}`);
  const choices = part("choices"), selects = {};
  const titles = [...new Set(cases.flatMap(one => Object.keys(one.values)))];
  const ordered = values => values.sort((a, b) => parseFloat(a) - parseFloat(b) || (a < b ? -1 : a > b ? 1 : 0));
  const numeric = values => values.every(value => !isNaN(parseFloat(value)));
  let current = cases[first];
  // All of one program: its schedule, what it takes, and what to run.
  const pick = (programs, {at}) => {
    const row = programs[at], served = programs.find(each => each.mark == "served") || programs[0];
    const other = row.at == served.at ? programs.find(each => !each.mark) || programs[1] : served;
    const marks = {served: " This is what is served.", tie: " It cannot be told apart from what is served.", best: " The best."};
    const takes = row.registers == null ? "not known" : `${row.registers} registers per thread, ${row.spilled} bytes spilled, ` +
      `${row.threads} threads and ${row.shared} bytes of shared memory per block, ${row.blocks} blocks per SM, ${row.code} bytes of code`;
    const lines = [
      ["Schedule", JSON.stringify(schedule(row))], ["Takes", takes],
      ["Reproduce", `tiledsched tune ${current.target} --candidates ${quoted([schedule(row)])}`]];
    if (other) lines.push([`Machine code beside that of ${other == served ? "what is served" : "the runner-up"}`,
      `tiledsched study profile ${current.target} --sass --candidates ${quoted([schedule(other), schedule(row)])}`]);
    const close = element("button", "close");
    close.onclick = () => { part("picked").hidden = true; };
    part("picked").replaceChildren(close,
      element("p", `${row.us} µs, ${row.relative.toFixed(3)} times the best time.${marks[row.mark] || ""}`),
      ...lines.map(([what, text], place) => element("p", `${what}: `, [element(place == 1 ? "span" : "code", text)])));
    part("picked").hidden = false;
  };
  const show = chosen => {
    current = chosen;
    for (const [title, select] of Object.entries(selects)) select.value = chosen.values[title] ?? "";
    part("top").innerHTML = chosen.top;
    part("facts").innerHTML = chosen.facts;
    if (part("picked")) part("picked").hidden = true;
    const data = Object.fromEntries(Object.entries(chosen.rows).map(
      ([name, rows]) => [name, unpacked(typeof rows == "string" ? shared[rows] : rows, texts)]));
    const programs = data.programs || [], served = programs.find(row => row.mark == "served") || programs[0];
    programs.forEach((row, at) => { row.at = at; row.relative = row.us / row.best_us; });
    for (const row of programs) row.differs = knobsOf(row).filter(name => row[name] !== served[name])
      .map(name => `${name.slice(KNOB.length)}=${shown(row[name])}`).join(" ") || "nothing";
    const told = rows => rows.forEach(row => { if (row.at != null) row.differs = programs[row.at]?.differs; });
    Object.values(data).forEach(told);
    for (const figure of section.querySelectorAll(".view")) {
      const {title: heading, spec, main} = views[figure.dataset.view], place = figure.querySelector(".chart");
      figure.querySelector(".note").innerHTML = texts[chosen.notes[figure.dataset.view]] || "";
      const empty = !data[main].length;
      figure.classList.toggle("empty", empty);
      figure.classList.toggle("tall", data[main].length > 14 && main == "effects");
      delete place.dataset.drawn;
      if (empty) { place.view?.finalize(); place.view = null; place.replaceChildren(); waiting.unobserve(place); continue; }
      const drawn = (title, values) => whenSeen(place, () => draw(place, {
        ...spec, title: {text: title, subtitle: [chosen.title, chosen.source], anchor: "start", offset: 12}, datasets: values},
        `${figure.dataset.view}-${chosen.title}`.replace(/\W+/g, "_"), row => pick(programs, row)));
      waiting.unobserve(place);
      if (figure.dataset.view == "pairs") pairs(figure, chosen.pair, programs, told, (pair, rows) =>
        drawn(`${pair.map(name => name.slice(KNOB.length)).join(" (upwards) and ")} together`, {pairs: rows}));
      else drawn(heading, data);
    }
  };
  // The two knobs of the map of pairs, which the reader chooses.
  const pairs = (figure, pair, programs, told, drawn) => {
    const varying = knobsOf(programs[0]).filter(name => new Set(programs.map(row => row[name])).size > 1);
    const both = pair.map((name, place) => {
      const select = document.createElement("select");
      select.setAttribute("aria-label", place ? "knob to the right" : "knob upwards");
      for (const each of varying) select.append(new Option(each.slice(KNOB.length), each));
      select.value = name;
      select.onchange = anew;
      return select;
    });
    function anew() {
      const chosen = both.map(select => select.value), rows = squares(programs, chosen);
      told(rows);
      drawn(chosen, rows);
    }
    figure.querySelector(".choices")?.remove();
    const box = element("div", "", both);
    box.className = "choices";
    figure.prepend(box);
    anew();
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
