// The page's script. Everything that comes from rows, errors or names goes into the page as text (textContent), never
// as markup. Nothing is fetched from anywhere but the page's own server.
"use strict";

const STATUS_MS = 2000, HISTORY_MS = 10000, ROWS_MS = 5000, EVENTS_MS = 5000;
const SPANS = [["1 h", 1], ["6 h", 6], ["24 h", 24], ["3 d", 72]];
const COLOURS = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#2aa198", "#c9a227", "#9c755f"];
const VERDICT_COLOURS = { ok: "#59a14f", length: "#f28e2b", empty: "#e15759", loop: "#b07aa1", junk: "#9c755f",
  unclosed: "#4e79a7", no_thinking: "#2aa198", abort: "#c9a227", refused: "#d37295", poison: "#6b4c9a", error: "#a8423f" };

const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const number = new Intl.NumberFormat("en-US");
const whole = (n) => number.format(Math.round(n));

// -- small things --------------------------------------------------------------------------------------------------

// make("li", {class: "bad"}, "text", child, ...)
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const all = Math.max(0, Math.round(seconds)), minutes = Math.floor(all / 60), hours = Math.floor(all / 3600);
  if (all < 100) return `${all} s`;
  if (minutes < 100) return `${minutes} min`;
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function dollars(amount) {
  return "$" + amount.toLocaleString("en-US", { minimumFractionDigits: amount < 10 ? 2 : 0, maximumFractionDigits: amount < 10 ? 2 : 0 });
}

function percent(share) {
  const value = 100 * share;
  return value === 0 ? "0 %" : value < 0.1 ? "<0.1 %" : value < 100 ? `${value.toFixed(1)} %` : "100 %";
}

function compact(n) {
  return n >= 1e6 ? `${(n / 1e6).toFixed(n >= 1e7 ? 0 : 1)}M` : n >= 1e4 ? `${Math.round(n / 1e3)}k` : n >= 1e3 ? `${(n / 1e3).toFixed(1)}k` : `${Math.round(n * 100) / 100}`;
}

const tone = (verdict) => (verdict === "ok" ? "good" : verdict === "length" ? "warn" : "bad");

async function ask(path) {
  const answer = await fetch(path);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error || `the page answers ${answer.status}`);
  return body;
}

// Do it now and again every so often, while the page is looked at.
function repeat(work, every) {
  const turn = async () => {
    if (!document.hidden) await work();
    setTimeout(turn, every);
  };
  turn();
}

// -- status --------------------------------------------------------------------------------------------------------

let latest = null;

async function readStatus() {
  try {
    const answer = await ask("/api/status");
    latest = answer.status;
    showStatus(latest, answer.trouble);
  } catch (error) {
    document.body.classList.add("stale");
    byId("fresh").textContent = latest ? `no answer since ${clock(latest.at)}` : "";
    if (!latest) byId("headline").textContent = String(error.message);
  }
}

function clock(at) {
  const then = new Date(1000 * at), today = new Date().toDateString() === then.toDateString();
  const time = then.toLocaleTimeString("en-GB");
  return today ? time : `${then.toLocaleDateString("en-GB", { weekday: "short", day: "numeric", month: "short" })} ${time}`;
}

function showStatus(now, trouble) {
  document.body.classList.toggle("stale", Boolean(trouble));
  byId("fresh").textContent = clock(now.at);
  byId("headline").textContent = now.headline;
  document.title = `gend: ${now.headline}`;
  const warnings = [...(trouble ? [`${trouble} What is shown is of ${clock(now.at)}.`] : []), ...now.warnings];
  byId("warnings").replaceChildren(...warnings.map((text) => make("li", null, text)));
  showFacts(now);
  byId("runs").replaceChildren(...showRuns(now.runs));
  showServers(now.servers, now.at);
  offerRuns(now.runs);
}

function showFacts(now) {
  const active = now.runs.filter((run) => run.state === "active" || run.state === "paused");
  const shown = active.length ? active : now.runs;
  const sum = (list, field) => list.reduce((total, item) => total + item[field], 0);
  const prompts = sum(shown, "prompts"), done = sum(shown, "rows_done");
  const facts = [];
  const fact = (value, label, kind) => facts.push(make("div", null, make("b", kind ? { class: kind } : null, value), make("span", null, label)));
  if (prompts) fact(done === prompts ? "100 %" : `${Math.floor((1000 * done) / prompts) / 10} %`, `${whole(done)} of ${whole(prompts)} rows in the store`);
  fact(whole(now.tokens_per_second), `tokens/s, ${now.rows_per_second.toFixed(2)} rows/s`);
  if (now.estimate) {
    const { seconds, low_seconds: low, high_seconds: high } = now.estimate;
    fact(duration(seconds), duration(low) === duration(high) ? "left" : `left, ${duration(low)} to ${duration(high)}`);
  }
  if (now.cost) {
    fact(dollars(now.cost.spent), now.cost.to_go === null ? "so far" : `so far, about ${dollars(now.cost.to_go)} to go`);
    const each = now.cost.per_million_tokens ?? now.cost.per_million_tokens_so_far;
    if (each !== null) fact(dollars(each), "for a million tokens");
  }
  const verdicts = {};
  for (const run of shown) for (const [word, count] of Object.entries(run.verdicts)) verdicts[word] = (verdicts[word] || 0) + count;
  const rows = Object.values(verdicts).reduce((a, b) => a + b, 0);
  if (rows) {
    const bad = (rows - (verdicts.ok || 0) - (verdicts.length || 0)) / rows;
    fact(percent(bad), "of the rows are bad", bad > 0.05 ? "bad" : bad > 0 ? "" : "good");
  }
  byId("facts").replaceChildren(...facts);
}

function showRuns(runs) {
  if (!runs.length) return [make("p", { class: "dim" }, "No run yet: gend enqueue FILE")];
  const order = ["active", "paused", "finished", "cancelled"];
  const sorted = [...runs].sort((a, b) => order.indexOf(a.state) - order.indexOf(b.state));
  return sorted.map((run) => {
    const total = Object.values(run.verdicts).reduce((a, b) => a + b, 0);
    const chips = Object.entries(run.verdicts).sort((a, b) => b[1] - a[1])
      .map(([word, count]) => make("span", null, make("span", { class: tone(word) }, word), ` ${percent(count / total)}`));
    if (run.tokens_per_second) chips.push(make("span", { class: "dim" }, `${whole(run.tokens_per_second)} tokens/s`));
    if (run.rejected) chips.push(make("span", { class: "dim" }, `${whole(run.rejected)} input lines rejected`));
    const state = run.state + (run.priority === "normal" ? "" : `, priority ${run.priority}`) + (run.eta_seconds === null ? "" : `, ${duration(run.eta_seconds)} left`);
    return make("div", { class: "run" },
      make("div", { class: "top" }, make("b", null, run.id), make("span", { class: run.state === "paused" ? "warn" : "dim" }, state)),
      make("progress", { max: run.prompts, value: run.rows_done, "aria-label": `progress of ${run.id}` }),
      make("div", { class: "top" }, make("span", { class: "count" }, `${whole(run.rows_done)} of ${whole(run.prompts)} rows`), make("span", { class: "chips" }, ...chips)),
      ...run.examples.map((example) => make("p", { class: "dim" }, example)));
  });
}

function showServers(servers, at) {
  const memory = servers.some((server) => server.memory_total_bytes !== null);
  const heads = ["server", "state", "since", "running", "waiting", "limited by", "tokens/s", "rows", "idle", "restarts", ...(memory ? ["memory", "temp."] : [])];
  const text = new Set(["server", "state", "limited by"]);
  const rows = [make("tr", null, ...heads.map((head) => make("th", text.has(head) ? { class: "text" } : null, head)))];
  for (const s of servers) {
    const gpus = s.gpus.length && s.gpus.join() !== String(s.number) ? ` (GPU ${s.gpus.join(", ")})` : "";
    const kind = s.state === "ready" ? "good" : s.state === "blocked" || s.state === "backoff" ? "bad" : "warn";
    const cells = [`${s.number}${gpus}`, s.state, duration(at - s.since), `${s.in_flight}/${s.limit}`, whole(s.waiting), s.limit ? s.limited_by : "",
      whole(s.tokens_per_second), whole(s.rows), s.idle_share === null ? "–" : percent(s.idle_share), String(s.restarts)];
    if (memory) cells.push(s.memory_total_bytes ? percent(s.memory_used_bytes / s.memory_total_bytes) : "", s.celsius === null ? "" : `${s.celsius} °C`);
    const noted = Boolean(s.last_error);
    rows.push(make("tr", noted ? { class: "noted" } : null, ...cells.map((cell, i) =>
      make("td", text.has(heads[i]) ? { class: heads[i] === "state" ? `text ${kind}` : "text" } : null, cell))));
    if (noted) rows.push(make("tr", null, make("td", { class: "error", colspan: heads.length }, `last error: ${s.last_error}`)));
  }
  if (!servers.length) rows.push(make("tr", null, make("td", { class: "text dim", colspan: heads.length }, "The daemon is down.")));
  byId("servers").replaceChildren(...rows);
}

// -- charts --------------------------------------------------------------------------------------------------------

const charts = {}; // id of the place -> {plot, key}: made anew only when its series, or the colours, change

function chart(id, key, data, options) {
  const place = byId(id), known = charts[id];
  const width = Math.max(200, place.clientWidth - 10);
  const scheme = matchMedia("(prefers-color-scheme: dark)").matches;
  const full = `${key}|${scheme}`;
  if (known && known.key === full) {
    if (known.plot.width !== width) known.plot.setSize({ width, height: options.height });
    known.plot.setData(data);
    return;
  }
  const axis = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
  place.replaceChildren();
  const plot = new uPlot({ width, ...options, axes: options.axes.map((own) => ({ ...axis, ...own })) }, data, place);
  charts[id] = { plot, key: full };
}

function nothing(id, text) {
  delete charts[id];
  byId(id).replaceChildren(make("p", null, text));
}

function lines(id, at, columns, names, colour, format, fill) {
  const series = names.map((name, i) => ({ label: name, stroke: colour(name, i), width: 1.5, points: { show: false },
    ...(fill ? { fill: colour(name, i) + "30" } : {}), value: (_, v) => (v === null || v === undefined ? "–" : format(v)) }));
  chart(id, `${names.join()}`, [at, ...names.map((name) => columns[name])], {
    height: 220,
    cursor: { y: false },
    scales: { x: { time: true }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.08 : 1] } },
    series: [{ value: (_, v) => (v === null || v === undefined ? "–" : clock(v)) }, ...series],
    axes: [{ values: times }, { values: (_, ticks) => ticks.map(format), size: 58 }],
  });
}

function times(plot, ticks) {
  const wide = plot.scales.x.max - plot.scales.x.min > 26 * 3600;
  return ticks.map((at) => {
    const then = new Date(1000 * at), hour = then.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
    return wide ? `${then.toLocaleDateString("en-GB", { weekday: "short" })} ${hour}` : hour;
  });
}

let span = 1;

async function readHistory() {
  let past;
  try {
    past = await ask(`/api/history?hours=${span}`);
  } catch { return; } // the status says what is wrong
  const known = (column) => column.some((value) => value !== null);
  const servers = Object.keys(past.tokens).filter((name) => known(past.tokens[name]));
  if (servers.length) {
    const named = Object.fromEntries(servers.map((name) => [`server ${name}`, past.tokens[name]]));
    lines("tokens", past.at, named, Object.keys(named), (_, i) => COLOURS[i % COLOURS.length], compact);
  } else nothing("tokens", "Nothing was made in this time.");
  const words = Object.keys(past.verdicts).filter((word) => word !== "ok" && past.verdicts[word].some((share) => share > 0)).sort();
  if (words.length) lines("shares", past.at, past.verdicts, words, (word) => VERDICT_COLOURS[word] || "#888888", percent);
  else nothing("shares", past.verdicts.ok ? "Every row made in this time is ok." : "No row was made in this time.");
  if (known(past.idle)) lines("idle", past.at, { idle: past.idle }, ["idle"], () => COLOURS[0], percent, true);
  else nothing("idle", "There was no run to work on in this time.");
}

function offerSpans() {
  byId("spans").replaceChildren(...SPANS.map(([name, hours]) => {
    const button = make("button", { type: "button", "aria-pressed": String(hours === span) }, name);
    button.addEventListener("click", () => { span = hours; offerSpans(); readHistory(); });
    return button;
  }));
}

function bars(id, histogram, colour) {
  if (!histogram.rows) return nothing(id, "No row yet.");
  const { step, bins } = histogram;
  const at = bins.map((_, i) => i * step), counts = bins.length === 1 ? [[0, step], [bins[0], 0]] : [at, bins];
  chart(id, `${step}`, counts, {
    height: 200,
    cursor: { y: false, points: { show: false } },
    scales: { x: { time: false, range: (_, low, high) => [-step / 2, high + step] }, y: { range: (_, low, high) => [0, high * 1.08 || 1] } },
    series: [
      { label: "tokens", value: (_, v) => (v === null || v === undefined ? "–" : `${whole(v)} to ${whole(v + step - 1)}`) },
      { label: "rows", stroke: colour, fill: colour + "b0", width: 1, points: { show: false }, paths: uPlot.paths.bars({ size: [0.9], align: 1 }),
        value: (_, v) => (v === null || v === undefined ? "–" : whole(v)) },
    ],
    axes: [{ values: (_, ticks) => ticks.map(compact) }, { values: (_, ticks) => ticks.map(compact), size: 48 }],
  });
}

// -- rows ----------------------------------------------------------------------------------------------------------

let chosenRun = null, chosenWord = null, shownRows = "";

function offerRuns(runs) {
  const select = byId("run"), ids = [...runs].reverse().map((run) => run.id);
  if (!ids.includes(chosenRun)) {
    const active = runs.find((run) => run.state === "active");
    chosenRun = active ? active.id : ids[0] || null;
    readRows();
  }
  if (ids.join() !== [...select.options].map((option) => option.value).join()) {
    select.replaceChildren(...ids.map((id) => make("option", { value: id }, id)));
  }
  select.value = chosenRun || "";
}

byId("run").addEventListener("change", (event) => { chosenRun = event.target.value; chosenWord = null; shownRows = ""; readRows(); });

async function readRows() {
  if (!chosenRun) return;
  let found;
  try {
    found = await ask(`/api/rows?run=${encodeURIComponent(chosenRun)}`);
  } catch { return; }
  bars("replies", found.replies, COLOURS[0]);
  bars("thoughts", found.thoughts, COLOURS[4]);
  const words = Object.keys(found.seen);
  const total = Object.values(found.seen).reduce((a, b) => a + b, 0);
  if (!words.includes(chosenWord)) chosenWord = words[0] || null;
  byId("words").replaceChildren(...words.map((word) => {
    const button = make("button", { type: "button", "aria-pressed": String(word === chosenWord) }, make("span", { class: tone(word) }, word), ` ${whole(found.seen[word])}`);
    button.addEventListener("click", () => { chosenWord = word; shownRows = ""; readRows(); });
    return button;
  }));
  const rows = found.rows[chosenWord] || [];
  const open = byId("rows").querySelector("details[open]") !== null && shownRows !== "";
  const newest = JSON.stringify([chosenRun, chosenWord, rows.map((row) => row.id + row.attempts)]);
  byId("sampled").textContent = total
    ? `${whole(total)} rows were looked at; the newest ${rows.length} with this verdict${open ? ", held while one is open" : ""}:`
    : "No row was looked at yet.";
  if (newest === shownRows || open) return;
  shownRows = newest;
  byId("rows").replaceChildren(...rows.map(showRow));
}

function showRow(row) {
  const start = (row.content || row.reasoning_content || row.error || "").slice(0, 140);
  const facts = `${whole(row.usage.completion_tokens)} tokens, ${whole(row.usage.reasoning_tokens)} thinking`;
  const details = make("details", null, make("summary", null, make("b", null, row.id), ` ${facts} `, make("span", { class: "start" }, start)));
  details.addEventListener("toggle", () => {
    if (!details.open || details.childElementCount > 1) return;
    const more = [`verdict ${row.verdict}`, `ended by ${row.finish_reason || "nothing"}`, `batch ${row.batch}`, `server ${row.server}`,
      `${row.seconds} s`, `${row.attempts} attempt${row.attempts === 1 ? "" : "s"}`, `seed ${row.seed}`, ...(row.changed ? [JSON.stringify(row.changed)] : [])].join(" · ");
    const text = (label, body, kind) => (body ? [make("div", { class: "label" }, label), make("pre", { dir: "auto", ...(kind ? { class: kind } : {}) }, body)] : []);
    details.append(make("p", { class: "dim" }, more), ...text("error", row.error, "bad"));
    for (const message of row.messages) {
      details.append(...text(`${message.role}, thought`, message.reasoning_content, "thought"), ...text(String(message.role), message.content),
        ...text(`${message.role}, tool calls`, message.tool_calls));
    }
    details.append(...text("tools offered", row.tools), ...text("thought", row.reasoning_content, "thought"), ...text("answer", row.content),
      ...text("tool calls", row.tool_calls));
    if (!row.content && !row.reasoning_content && !row.tool_calls) details.append(make("p", { class: "bad" }, "no reply at all"));
  });
  return details;
}

// -- events --------------------------------------------------------------------------------------------------------

async function readEvents() {
  let events;
  try {
    events = await ask("/api/events");
  } catch { return; }
  byId("events").replaceChildren(...(events.length ? events : [{ at: Date.now() / 1000, text: "nothing has happened yet" }]).map((event) =>
    make("li", null, make("time", null, clock(event.at)), make("span", event.bad ? { class: "bad" } : null, event.text))));
}

// ------------------------------------------------------------------------------------------------------------------

offerSpans();
repeat(readStatus, STATUS_MS);
repeat(readHistory, HISTORY_MS);
repeat(readRows, ROWS_MS);
repeat(readEvents, EVENTS_MS);
addEventListener("resize", () => { readHistory(); readRows(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) { readStatus(); readHistory(); readRows(); readEvents(); } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readHistory(); readRows(); });
