"use strict";
// Asks for v1/overview every second and shows it. Nodes of the document are kept from one answer to the next, and touched only where the
// text is another one: nothing flickers, and a selection stays. Names come from users: they only ever become text.

const EVERY_MS = 1000, HIDDEN_EVERY_MS = 10000, GIVE_UP_MS = 8000, LATE_S = 3, SILENT_S = 10, REPLICA_S = 20, MOST_ROWS = 500;
const byId = (id) => document.getElementById(id);

// ---- text

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
function scaled(bytes) {
  let unit = 0;
  while (bytes >= 1024 && unit < UNITS.length - 1) { bytes /= 1024; unit++; }
  return [unit === 0 || bytes >= 100 ? String(Math.round(bytes)) : bytes.toFixed(1), UNITS[unit]];
}
const size = (bytes) => (bytes === null ? "–" : scaled(bytes).join(" "));
function sizeOf(part, whole) {  // "1.0 of 4.0 GiB", and "3.0 MiB of 4.0 GiB"
  const [value, unit] = scaled(part), [all, wholeUnit] = scaled(whole);
  return `${value}${part === 0 || unit === wholeUnit ? "" : ` ${unit}`} of ${all} ${wholeUnit}`;
}
function age(seconds) {
  if (seconds === null) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const s = Math.floor(seconds), two = (n) => String(n).padStart(2, "0");
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} m ${two(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${two(Math.floor(s / 60) % 60)} m`;
  return `${Math.floor(s / 86400)} d ${two(Math.floor(s / 3600) % 24)} h`;
}
const short = (seconds) => (seconds < 1 ? `${Math.round(1000 * seconds)} ms` : age(seconds));
const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
const number = (n) => (n === null ? "–" : String(n));
const percent = (part, whole) => (whole > 0 ? Math.min(100, (100 * part) / whole) : 0);

// ---- the document

function say(element, text) { if (element.textContent !== text) element.textContent = text; }
function look(element, name) { if (element.className !== name) element.className = name; }
function show(element, yes) { if (element.hidden === yes) element.hidden = !yes; }
function set(element, name, value) { if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value); }
function make(tag, name, ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...children);
  return element;
}

/** Has `parent` hold one child for each item, in their order: that of the item with the same key before, or a new one. */
function keep(parent, items, key, create, fill) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const name = key(item);
    let child = before.get(name);
    if (child) before.delete(name);
    else { child = create(); child.dataset.key = name; }
    fill(child, item);
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  before.forEach((child) => child.remove());
}

/** Rows of a table. A column is [class, fill(cell, item)]; the first is the row's header. */
function table(id, items, key, columns) {
  const body = byId(id).tBodies[0];
  const create = () => make("tr", "", ...columns.map(([name], i) => {
    const cell = make(i === 0 ? "th" : "td", name);
    if (i === 0) cell.scope = "row";
    return cell;
  }));
  keep(body, items, key, create, (row, item) => columns.forEach(([, fill], i) => fill(row.cells[i], item)));
}
const text = (of) => (cell, item) => say(cell, of(item));

/** A symbol and a word, so that colour is not all there is; and a line below, if there is one. */
function mark(cell, kind, symbol, word, note) {
  if (!cell.firstChild) {
    const sign = make("span", "mark");
    sign.setAttribute("aria-hidden", "true");
    cell.append(make("span", "", sign, " ", make("span")), make("span", "note"));
  }
  const [line, below] = cell.children;
  look(line, kind);
  say(line.children[0], symbol);
  say(line.children[1], word);
  say(below, note ?? "");
  show(below, Boolean(note));
}

// ---- what is shown

const STATES = {
  serving: [0, "ok", "●"], joined: [2, "muted", "○"], paused: [3, "warn", "‖"], incomplete: [4, "warn", "◌"], poisoned: [5, "bad", "✕"],
  gone: [6, "bad", "✕"], left: [-1, "muted", "○"],
};
const worst = (r) => STATES[r.state][0] || (r.behind ? 1 : 0);
const isThere = (r) => r.state !== "gone" && r.state !== "left";

function showHead(told) {
  const group = told.group;
  say(byId("name"), group ? group.name : "Weights");
  show(byId("facts"), Boolean(group));
  if (!group) {
    document.title = told.versions.length ? `v${told.versions[0].version} · weights` : "weights";
    return;
  }
  const there = group.receivers.filter(isThere);
  document.title = `${group.behind ? "▲ " : ""}v${number(group.version)} · ${group.name}`;
  say(byId("version"), number(group.version));
  say(byId("published"), number(group.published));
  const stale = byId("staleness");
  say(stale, !there.length ? "no receivers" : !group.behind ? "none" : `${count(group.behind, "version")}, ${age(group.stale_s)}`);
  look(stale, group.behind ? "warn" : there.length ? "ok" : "muted");
  const { ranks, world } = group.trainers;
  say(byId("trainers"), world ? `${ranks} of ${world}` : "none");
  look(byId("trainers"), world && ranks === world ? "" : "warn");
}

function showNodes(nodes) {
  const total = nodes.reduce((sum, n) => sum + n.capacity_bytes, 0), used = nodes.reduce((sum, n) => sum + n.used_bytes, 0);
  say(byId("nodes-sum"), nodes.length ? `${count(nodes.length, "node")}${total ? `, ${sizeOf(used, total)} used` : ""}` : "");
  show(byId("nodes-none"), !nodes.length);
  const create = () => {
    const bar = make("div", "bar", make("div", "pinned"), make("div", "used"));
    bar.setAttribute("role", "meter");
    bar.setAttribute("aria-valuemin", "0");
    bar.setAttribute("aria-valuemax", "100");
    const under = make("div", "under", make("span"), make("span"), make("span"));
    return make("li", "", make("div", "top", make("strong"), make("span")), bar, under, make("div", "bad"));
  };
  keep(byId("nodes"), nodes, (n) => n.host, create, (item, n) => {
    const [top, bar, under, error] = item.children, known = n.capacity_bytes > 0;
    const share = percent(n.used_bytes, n.capacity_bytes), pinned = Math.min(share, percent(n.pinned_bytes, n.capacity_bytes));
    say(top.children[0], n.host);
    say(top.children[1], known ? `${share.toFixed(0)} %` : "");
    bar.children[0].style.width = `${pinned}%`;
    bar.children[1].style.width = `${share - pinned}%`;
    set(bar, "aria-valuenow", share.toFixed(0));
    set(bar, "aria-label", `pool of ${n.host}`);
    set(bar, "aria-valuetext", known ? sizeOf(n.used_bytes, n.capacity_bytes) : "not known");
    say(under.children[0], known ? sizeOf(n.used_bytes, n.capacity_bytes) : n.error);
    say(under.children[1], known && n.spilled_bytes ? `spilled ${size(n.spilled_bytes)}` : "");
    say(under.children[2], known ? `pinned ${size(n.pinned_bytes)}` : "");
    const wrong = [n.spill_error && `spilling fails: ${n.spill_error}`, n.waiting && `${count(n.waiting, "request")} waiting`];
    say(error, wrong.filter(Boolean).join("; "));
    show(error, Boolean(error.textContent));
  });
}

function showTransfers(transfers) {
  show(byId("transfers"), transfers.length > 0);
  show(byId("transfers-none"), !transfers.length);
  table("transfers", transfers, (t) => `${t.what} ${t.version}`, [
    ["n", text((t) => number(t.version))],
    ["minor", text((t) => (t.mode ? `${t.what}, ${t.mode}` : t.what))],
    ["", text((t) => t.phase)],
    ["", (cell, t) => {
      const bar = cell.firstChild ?? cell.appendChild(document.createElement("progress"));
      set(bar, "aria-label", `version ${t.version}`);
      if (t.total_bytes) { set(bar, "max", t.total_bytes); set(bar, "value", Math.min(t.moved_bytes, t.total_bytes)); }
      else bar.removeAttribute("value");
    }],
    ["n", text((t) => (t.total_bytes ? sizeOf(t.moved_bytes, t.total_bytes) : "–"))],
    ["n", text((t) => (t.bytes_per_s === null ? "–" : `${size(t.bytes_per_s)}/s`))],
    ["n", text((t) => age(t.seconds))],
    ["text", text((t) => (t.receivers.length > 3 ? count(t.receivers.length, "receiver") : t.receivers.join(", ")))],
  ]);
}
const few = (names) => (names.length > 8 ? `${names.slice(0, 8).join(", ")} and ${names.length - 8} more` : names.join(", "));

function showReceivers(told) {
  const group = told.group, waited = told.shortfalls.some((s) => s.what === "group");
  const all = group ? [...group.receivers] : [];
  all.sort((a, b) => worst(b) - worst(a) || (b.behind ?? 0) - (a.behind ?? 0) || (a.name < b.name ? -1 : 1));
  const current = all.filter((r) => r.state === "serving" && r.behind === 0).length, shown = all.slice(0, MOST_ROWS);
  const more = all.length > shown.length ? `; the ${shown.length} worst are shown` : "";
  say(byId("receivers-sum"), all.length ? `${current} of ${all.filter((r) => r.state !== "left").length} serve the newest version${more}` : "");
  show(byId("receivers"), all.length > 0);
  show(byId("receivers-none"), !all.length);
  say(byId("receivers-none"), group ? "No engine has joined." : waited ? "The group does not answer." : "This endpoint has no group.");
  table("receivers", shown, (r) => r.name, [
    ["", text((r) => r.name)],
    ["", (cell, r) => mark(cell, STATES[r.state][1], STATES[r.state][2], r.state)],
    ["n", text((r) => number(r.version))],
    ["n", (cell, r) => { say(cell, r.behind === null ? "–" : r.behind ? `▲ ${r.behind}` : "0"); look(cell, r.behind ? "n warn" : "n"); }],
    ["n", text((r) => (r.behind ? age(r.stale_s) : "–"))],
    ["n", text((r) => age(r.since_s))],
    ["n", text((r) => (r.world ? (r.ranks === r.world ? String(r.ranks) : `${r.ranks} of ${r.world}`) : "–"))],
    ["text", text((r) => {
      const silent = isThere(r) && r.silent_s > SILENT_S ? `not heard of for ${age(r.silent_s)}` : "";
      return [few(r.hosts), r.why, silent].filter(Boolean).join("; ");
    })],
  ]);
}

const replicas = new Map();  // what each told last of who reads from it, and when: any of them may answer
function noteReaders(told) {
  replicas.set(told.replica, { at: told.time, versions: new Map(told.versions.map((v) => [v.version, v.readers])) });
  replicas.forEach((r, name) => { if (told.time - r.at > REPLICA_S) replicas.delete(name); });
}
const readersOf = (version) => [...replicas.values()].reduce((sum, r) => sum + (r.versions.get(version) ?? 0), 0);

function showVersions(versions) {
  const stored = versions.filter((v) => v.places.includes("store"));
  say(byId("versions-sum"), stored.length ? `${stored.length} stored, ${size(stored.reduce((sum, v) => sum + (v.nbytes ?? 0), 0))}` : "");
  show(byId("versions"), versions.length > 0);
  show(byId("versions-none"), !versions.length);
  table("versions", versions, (v) => String(v.version), [
    ["n", text((v) => String(v.version))],
    ["n", text((v) => size(v.nbytes))],
    ["n", text((v) => age(v.age_s))],
    ["", text((v) => v.places.join(", ") || "–")],
    ["n", text((v) => String(v.receivers.length))],
    ["n", text((v) => String(readersOf(v.version)))],
    ["text", text((v) => few(v.pins.map((p) => (p.left_s === null ? p.name : `${p.name} (${age(Math.max(0, p.left_s))} left)`))) || "–")],
  ]);
}

function showOutcomes(outcomes, now) {
  show(byId("outcomes"), outcomes.length > 0);
  show(byId("outcomes-none"), !outcomes.length);
  table("outcomes", outcomes, (o) => `${o.what} ${o.version} ${Math.round(now - o.ago_s)}`, [
    ["n", text((o) => age(o.ago_s))],
    ["n", text((o) => number(o.version))],
    ["", text((o) => o.what)],
    ["", text((o) => o.mode || "–")],
    ["n", text((o) => short(o.seconds))],
    ["n", text((o) => (o.pause_s ? short(o.pause_s) : "–"))],
    ["n", text((o) => (o.nbytes ? size(o.nbytes) : "–"))],
    ["n", text((o) => String(o.receivers.length))],
    ["text", (cell, o) => {
      const lost = Object.entries(o.lost).map(([name, why]) => `${name}: ${why}`), notes = [...lost, ...o.fallbacks].join("; ");
      if (o.error) mark(cell, "bad", "✕", "failed", o.error);
      else if (lost.length) mark(cell, "warn", "▲", `without ${lost.length}`, notes);
      else mark(cell, "ok", "✓", o.fallbacks.length ? "done, by another mode" : "done", notes);
    }],
  ]);
}

// ---- asking

let answered = null, said = "", failure = "", told = null, timer = 0, asking = false;

function announce(what) {  // once, when it changes: what ticks is not read aloud
  if (what !== said) { said = what; say(byId("live"), what); }
}

function showProblems() {
  const problems = (told ? told.shortfalls : []).map((s) => {
    const old = s.age_s === null ? "nothing is known of it yet" : `what is shown is ${age(s.age_s)} old`;
    return `${s.what}: ${s.why} – ${old}`;
  });
  const silent = answered === null ? null : (performance.now() - answered) / 1000;
  if (failure) problems.unshift(silent === null ? failure : `${failure} – what is shown is ${age(silent)} old`);
  const list = byId("problems");
  keep(list, problems.map((p, i) => [i, p]), ([i]) => String(i), () => make("li"), (li, [, p]) => say(li, p));
  show(list, problems.length > 0);
  const link = byId("link");
  if (silent === null) { say(link, failure ? "no answer" : "asking …"); look(link, failure ? "bad" : "muted"); }
  else if (silent > LATE_S || failure) { say(link, `✕ no answer for ${silent.toFixed(0)} s`); look(link, "bad"); }
  else { say(link, `● live, ${new Date(1000 * told.time).toLocaleTimeString([], { hour12: false })}`); look(link, "ok"); }
  announce(failure ? "The endpoint does not answer; what is shown is old." : problems.length ? "Some of it could not be looked at." : told ? "Live." : "");
}

function showAll() {
  showHead(told);
  showNodes(told.nodes);
  showTransfers(told.group ? told.group.transfers : []);
  showReceivers(told);
  noteReaders(told);
  showVersions(told.versions);
  showOutcomes(told.group ? told.group.outcomes : [], told.time);
}

async function ask() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  const token = sessionStorage.getItem("token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  try {
    const answer = await fetch("v1/overview", { cache: "no-store", signal: AbortSignal.timeout(GIVE_UP_MS), headers });
    show(byId("ask"), answer.status === 401 || answer.status === 403);
    const found = await answer.json().catch(() => null);
    if (!answer.ok || !found) failure = `the endpoint answers ${answer.status}${found && found.detail ? `: ${found.detail}` : ""}`;
    else { told = found; answered = performance.now(); failure = ""; }
  } catch (error) {
    const late = error.name === "TimeoutError";
    failure = late ? `the endpoint has not answered within ${GIVE_UP_MS / 1000} s` : "the endpoint cannot be reached";
  }
  asking = false;
  if (told && !failure) showAll();
  showProblems();
  timer = setTimeout(ask, document.hidden ? HIDDEN_EVERY_MS : EVERY_MS);
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", byId("token").value);
  byId("token").value = "";
  ask();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
setInterval(showProblems, 1000);  // while nothing comes, it is told for how long
ask();
