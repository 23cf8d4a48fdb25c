"""What a page does in the browser: unpack, draw when seen, sort, limit and filter."""

from __future__ import annotations

SCRIPT = """
(function () {
'use strict';
var GRID = 'rgba(128,128,128,0.25)', EAGER = 100, CARDS = CARDS_OF_PAGE;
function all(root, what) { return Array.from(root.querySelectorAll(what)); }
function made(tag, name, text) {
  var element = document.createElement(tag);
  if (name) element.className = name;
  if (text) element.textContent = text;
  return element;
}

/* Packed is gzip as base64. */
async function unpack(script) {
  var bytes = Uint8Array.from(atob(script.textContent), function (c) { return c.charCodeAt(0); });
  var gzip = new DecompressionStream('gzip'), writer = gzip.writable.getWriter();
  writer.write(bytes);
  writer.close();
  var reader = gzip.readable.getReader(), decoder = new TextDecoder(), text = '';
  for (;;) {
    var part = await reader.read();
    if (part.done) return text + decoder.decode();
    text += decoder.decode(part.value, {stream: true});
  }
}

var plotly = null;
function library() {
  plotly = plotly || unpack(document.getElementById('plotly')).then(function (code) {
    document.head.appendChild(made('script', '', code));
    return window.Plotly;
  });
  return plotly;
}

/* Of a logarithmic axis: 1, 2 and 5 of a power of ten, in full; of a long one the powers. Plotly's
   own are in full where they are not even one power apart, and else have a 5 for 500. */
function ticks(data, axis) {
  var values = data.flatMap(function (trace) { return trace[axis] || []; })
    .filter(function (value) { return value > 0; });
  var low = Math.log10(Math.min.apply(null, values));
  var high = Math.log10(Math.max.apply(null, values));
  if (!(high - low > 0.7)) return {};
  var at = [], steps = high - low > 2.5 ? [1] : [1, 2, 5];
  for (var power = Math.floor(low) - 1; power <= high + 1; power++)
    steps.forEach(function (step) { at.push(step * Math.pow(10, power)); });
  return {tickvals: at, ticktext: at.map(function (value) {
    return value.toLocaleString('en', {maximumSignificantDigits: 1});
  })};
}

function layout(own, height, data) {
  var axis = {gridcolor: GRID, zerolinecolor: GRID, automargin: true, title: {standoff: 10}};
  var whole = {
    height: height, margin: {l: 60, r: 20, t: 14, b: 50}, colorway: COLOURS_OF_PAGE,
    paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', autosize: true,
    font: {family: 'system-ui, sans-serif', size: 13}, hoverlabel: {align: 'left'},
    /* At the figure's foot, whatever its height: below the axis it would cover the title of a
       narrow one, whose entries take several lines. */
    legend: {orientation: 'h', traceorder: 'normal', yref: 'container', y: 0, yanchor: 'bottom',
             x: 0}
  };
  Object.assign(whole, own);
  /* A finger scrolls the page; it does not zoom a plot by accident. */
  if (window.matchMedia('(pointer: coarse)').matches) whole.dragmode = false;
  ['xaxis', 'yaxis'].forEach(function (name) {
    var given = own[name] || {};
    whole[name] = Object.assign({}, axis, given.type === 'log' ? ticks(data, name[0]) : {}, given);
    whole[name].title = Object.assign({}, axis.title, given.title);
  });
  return whole;
}

function draw(plot) {
  if (plot.dataset.drawn) return Promise.resolve();
  plot.dataset.drawn = 'yes';
  var choices = JSON.parse(plot.querySelector('script').textContent);
  var room = made('div', 'plotly-graph-div'), height = Number(plot.dataset.height);
  room.style.minHeight = plot.dataset.height + 'px';
  room.setAttribute('role', 'img');
  room.setAttribute('aria-label', plot.getAttribute('aria-label'));
  var show = function (choice) {
    return library().then(function (Plotly) {
      return Plotly.react(room, choice.data, layout(choice.layout, height, choice.data),
                          {displayModeBar: false});
    });
  };
  if (choices.length > 1) {
    var label = made('label', 'menu', 'axes'), menu = made('select');
    choices.forEach(function (choice) { menu.appendChild(made('option', '', choice.name)); });
    menu.addEventListener('change', function () { show(choices[menu.selectedIndex]); });
    label.appendChild(menu);
    plot.appendChild(label);
  }
  plot.appendChild(room);
  return show(choices[0]).then(function () {
    var width = room.offsetWidth;
    new ResizeObserver(function () {
      if (!room.offsetWidth || room.offsetWidth === width) return;
      width = room.offsetWidth;
      window.Plotly.Plots.resize(room);
    }).observe(room);
  });
}

/* One after the other, with time between them for what the reader does. */
function drawAll(plots) {
  return plots.reduce(function (before, plot) {
    return before.then(function () { return draw(plot); })
      .then(function () { return new Promise(function (go) { setTimeout(go, 0); }); });
  }, Promise.resolve());
}

/* What is in sight comes before its turn. */
var seen = new IntersectionObserver(function (entries) {
  entries.forEach(function (entry) {
    if (!entry.isIntersecting) return;
    seen.unobserve(entry.target);
    draw(entry.target);
  });
}, {rootMargin: '400px'});

/* Rows beyond a table's limit, and those the filter leaves out. */
function show(table) {
  var limit = Number(table.dataset.limit), shown = 0;
  Array.from(table.tBodies[0].rows).forEach(function (row) {
    var fits = !('out' in row.dataset) && ++shown;
    row.hidden = !fits || (limit && !table.dataset.all && shown > limit);
  });
  if (!limit) return;
  var button = table.parentNode.nextElementSibling;
  if (!button || !button.matches('button.more')) {
    button = made('button', 'more');
    button.type = 'button';
    button.addEventListener('click', function () {
      table.dataset.all = table.dataset.all ? '' : 'yes';
      show(table);
    });
    table.parentNode.after(button);
  }
  button.hidden = shown <= limit;
  button.textContent = table.dataset.all ? 'Show the first ' + limit : 'Show all ' + shown;
}

function sort(head) {
  var table = head.closest('table'), body = table.tBodies[0];
  var column = Array.prototype.indexOf.call(head.parentNode.children, head);
  var down = head.getAttribute('aria-sort') === 'ascending';
  all(head.parentNode, 'th').forEach(function (other) { other.setAttribute('aria-sort', 'none'); });
  head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  var order = new Intl.Collator('en', {numeric: true});
  Array.from(body.rows).map(function (row) {
    var cell = row.cells[column], number = cell.dataset.order;
    return [number === undefined ? cell.textContent : parseFloat(number), row];
  }).sort(function (a, b) {
    var x = a[0], y = b[0], numbers = [x, y].filter(Number.isFinite).length;
    if (numbers === 1) return Number.isFinite(x) ? -1 : 1;  /* what has no number goes last */
    var first = numbers === 2 ? x - y : order.compare(x, y);
    return down ? -first : first;
  }).forEach(function (pair) { body.appendChild(pair[1]); });
  show(table);
}

document.addEventListener('click', function (event) {
  var head = event.target.closest('table.sortable th');
  if (head) sort(head);
});

function prepare(root) {
  all(root, 'table.sortable').forEach(show);
  all(root, '.plot').forEach(function (plot) { seen.observe(plot); });
}

function open(card) {
  card.hidden = false;
  card.open = true;
}
all(document, 'details.card').forEach(function (card) {
  card.addEventListener('toggle', function () {
    var packed = card.open && card.querySelector('script.packed');
    if (!packed) return;
    packed.className = 'unpacking';
    unpack(packed).then(function (body) {
      var room = made('div');
      room.innerHTML = body;
      packed.replaceWith(room);
      prepare(room);
      drawAll(all(room, '.plot'));
    });
  });
});

function follow() {
  var card = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
  if (!card) return;
  if (card.matches('details')) open(card);
  card.scrollIntoView();
}
window.addEventListener('hashchange', follow);
/* The same link once more, after its section was closed: no change of address. */
document.addEventListener('click', function (event) {
  var link = event.target.closest('a[href^="#"]');
  if (link && link.getAttribute('href') === location.hash) follow();
});

var form = document.getElementById('filter');
function filter() {
  var fields = Array.from(form.elements).filter(function (f) { return f.name; });
  var words = form.elements.find.value.toLowerCase().split(/\\s+/).filter(Boolean);
  var cards = all(document, 'details.card[data-find]'), passed = {}, count = 0;
  cards.forEach(function (card) {
    var fits = words.every(function (word) { return card.dataset.find.includes(word); })
      && fields.every(function (f) {
        return f.name === 'find' || !f.value || card.dataset[f.name] === f.value;
      });
    passed[card.id] = fits;
    count += fits ? 1 : 0;
    card.hidden = !fits || (count > CARDS && !card.open);
  });
  all(document, 'tr[data-at]').forEach(function (row) {
    var fits = row.dataset.at.split(' ').some(function (at) { return passed[at]; });
    if (fits) delete row.dataset.out; else row.dataset.out = '';
  });
  new Set(all(document, 'tr[data-at]').map(function (row) { return row.closest('table'); }))
    .forEach(show);
  form.querySelector('output').textContent = count + ' of ' + cards.length + ' problems'
    + (count > CARDS ? '; ' + CARDS + ' of their sections below, any by its link' : '');
}
if (form) {
  var waiting = 0;
  form.hidden = false;
  form.addEventListener('input', function () {
    clearTimeout(waiting);
    waiting = setTimeout(filter, 120);
  });
  form.addEventListener('submit', function (event) { event.preventDefault(); filter(); });
}

prepare(document);
if (form) filter();
follow();
/* A page of few figures draws all of them, so that it can be printed and searched. */
var plots = all(document, '.plot');
if (plots.length <= EAGER) drawAll(plots);
}());
"""
