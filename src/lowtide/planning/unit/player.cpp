// Plays decisions on a unit and moves a plan down by the same rules, in the same order of sums, as simulate.py and greedy.py,
// which say what the rules are; tests compare the two event by event. native.py is the Python interface.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <queue>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t FOREVER = int64_t{1} << 60;
constexpr int64_t NEVER = -2;

enum Action : int8_t { KEEP, RECOMPUTE, MOVE };

struct Lists {  // the items of list i are items[at[i]] to items[at[i + 1]]
    const int64_t *at;
    const int64_t *items;
    const int64_t *begin(int64_t i) const { return items + at[i]; }
    const int64_t *end(int64_t i) const { return items + at[i + 1]; }
};

struct Span {
    int64_t value, start, end;
};

struct Decision {
    int64_t value, gap, action, until;
};

}  // namespace

// The layout that native.py fills in; the arrays are its own and outlive the unit.
struct Laid {
    int64_t events, values, base_bytes;
    const int64_t *plain_live, *rise;                             // per event
    const double *again_seconds;                                  // per event: of an operator that runs again
    const int64_t *inside_bytes;                                  // per event
    const int64_t *reads_at, *reads;                              // per event: values read
    const int64_t *writes_at, *writes;                            // per event: values produced, new versions included
    const int64_t *overwrites_at, *overwrites;                    // per event: old versions
    const int64_t *bytes, *born, *held_until, *released;          // per value
    const int64_t *open, *remakeable, *movable, *overwritten;     // per value; open: neither pinned nor from before the unit
    const int64_t *gap_starts, *needs_at, *need_events, *need_pins;  // per value
    const double *write_seconds, *back_seconds;                   // per value
};

namespace {

struct Outcome {
    int64_t peak_bytes = 0, peak_event = 0;
    double seconds = 0.0;
    std::vector<Decision> decisions;  // by value and gap
    std::vector<Span> spans;          // by value and start
};

class Unit {
  public:
    explicit Unit(const Laid &laid)
        : p(laid), reads{laid.reads_at, laid.reads}, writes{laid.writes_at, laid.writes},
          overwrites{laid.overwrites_at, laid.overwrites}, slots(laid.values + 1), chosen(laid.values, 0),
          captured(laid.values, 0), recorded(laid.events, 0), lasting(laid.values), ends(laid.values),
          present_until(laid.values, NEVER), absent_since(laid.values, NEVER), board2(laid.values, 0),
          seen(laid.values, 0), reader(laid.values, -1), fresh(laid.values, 0), held(laid.values, 0),
          in_chain(laid.events, 0), first_span(laid.values + 1) {
        for (int64_t v = 0; v < p.values; v++) slots[v + 1] = slots[v] + needs(v) + 1;
        action.assign(slots.back(), KEEP);
        until.assign(slots.back(), 0);
    }

    // The outcome of decisions; null if the runtime cannot carry them out.
    std::unique_ptr<Outcome> play(const std::vector<Decision> &decisions, double *spent = nullptr, int64_t *peaks = nullptr);

    // The next state of the walk: the cheapest bytes leave the peak event; null if none can.
    std::unique_ptr<Outcome> move(const Outcome &from, int64_t step, const std::vector<std::pair<int64_t, int64_t>> &barred);

    // Whether the last call failed: its decisions cannot be carried out, or there was no memory.
    bool failed = false;

    const Laid p;

  private:
    struct Offer {
        Decision decision;
        int64_t freed;
        double seconds;
    };

    int64_t needs(int64_t v) const { return p.needs_at[v + 1] - p.needs_at[v]; }
    int64_t need(int64_t v, int64_t k) const { return p.need_events[p.needs_at[v] + k]; }
    int64_t pin(int64_t v, int64_t k) const { return p.need_pins[p.needs_at[v] + k]; }
    int64_t plain_end(int64_t v) const { return std::max(p.held_until[v], p.released[v]); }
    bool capturable(int64_t v) const { return p.overwritten[v] == FOREVER; }
    // Needs of a value up to an event, which is included.
    int64_t gap(int64_t v, int64_t e) const {
        const int64_t *first = p.need_events + p.needs_at[v], *last = p.need_events + p.needs_at[v + 1];
        return std::upper_bound(first, last, e) - first;
    }
    // Needs of a value before an event.
    int64_t gap_before(int64_t v, int64_t e) const {
        const int64_t *first = p.need_events + p.needs_at[v], *last = p.need_events + p.needs_at[v + 1];
        return std::lower_bound(first, last, e) - first;
    }

    void begin();
    bool decide(const std::vector<Decision> &decisions);
    bool legal() const;
    void close();
    bool present(int64_t v, int64_t e) const;
    void leave(int64_t v, int64_t after);
    void settle(int64_t e);
    void back(int64_t v, int64_t e);
    bool is_held(int64_t v, int64_t e) const;
    bool steals(int64_t old, int64_t at) const { return fresh[old] && !held[old] && reader[old] <= at; }
    int64_t meet(int64_t v, int64_t e, int64_t k, int64_t live, double *spent);
    int64_t remake(int64_t v, int64_t e, int64_t live, double *spent);
    void chain(int64_t v, int64_t e);
    void index_spans(const Outcome &from);
    bool absent(const Outcome &from, int64_t v, int64_t e) const;
    bool offer(const Outcome &from, int64_t v, int64_t g, int64_t event, Offer &found);
    double chain_seconds(const Outcome &from, int64_t v, int64_t at, double limit);
    bool is_free(const Outcome &from, int64_t r, int64_t at) const;

    using Timed = std::pair<int64_t, int64_t>;
    using Heap = std::priority_queue<Timed, std::vector<Timed>, std::greater<Timed>>;

    const Lists reads, writes, overwrites;
    std::vector<int64_t> slots;
    std::vector<int8_t> action;
    std::vector<int64_t> until;
    std::vector<int64_t> away;  // values with decisions
    std::vector<char> chosen, captured, recorded;
    std::vector<int64_t> lasting, ends, present_until, absent_since;
    std::vector<char> board2;
    Heap leaving, ending;
    int64_t absent_bytes = 0;
    double seconds = 0.0;
    bool interrupted = false;  // by an exception, so that what one chain marks may be marked still
    std::vector<Span> spans;
    // One chain.
    std::vector<int64_t> stack, ops, fetched, seen_values, fresh_values, held_values;
    std::vector<char> seen;
    std::vector<int64_t> reader;
    std::vector<char> fresh, held, in_chain;
    std::vector<int64_t> first_span;
};

// Forgets what a call that ended by an exception has left marked.
void Unit::begin() {
    failed = false;
    if (interrupted) {
        for (auto *marks : {&seen, &fresh, &held, &in_chain}) std::fill(marks->begin(), marks->end(), 0);
        std::fill(reader.begin(), reader.end(), -1);
    }
    interrupted = true;
}

bool Unit::decide(const std::vector<Decision> &decisions) {
    for (const Decision &d : decisions)
        if (d.value < 0 || d.value >= p.values || d.gap < 0 || d.gap > needs(d.value) || (d.action != RECOMPUTE && d.action != MOVE))
            return false;
    std::fill(action.begin(), action.end(), KEEP);
    std::fill(chosen.begin(), chosen.end(), 0);
    away.clear();
    for (const Decision &d : decisions) {
        const int64_t slot = slots[d.value] + d.gap;
        action[slot] = static_cast<int8_t>(d.action);
        until[slot] = d.until;
        if (!chosen[d.value]) {
            chosen[d.value] = 1;
            away.push_back(d.value);
        }
    }
    return legal();
}

bool Unit::legal() const {
    for (int64_t v : away) {
        if (p.released[v] < 0) return false;
        for (int64_t g = 0; g <= needs(v); g++) {
            const int8_t how = action[slots[v] + g];
            if (how == KEEP) continue;
            if (g < p.gap_starts[v]) return false;
            if (how == RECOMPUTE && !p.remakeable[v]) return false;
            if (how == MOVE && (!p.movable[v] || action[slots[v] + p.gap_starts[v]] != MOVE)) return false;
        }
    }
    return true;
}

// Operators that must be recorded, values that must be captured, and until when each can be needed.
void Unit::close() {
    std::fill(captured.begin(), captured.end(), 0);
    std::fill(recorded.begin(), recorded.end(), 0);
    stack.clear();
    std::vector<char> remade(p.values, 0);
    for (int64_t v : away)
        for (int64_t g = 0; g <= needs(v); g++)
            if (action[slots[v] + g] == RECOMPUTE && !remade[v]) {
                remade[v] = 1;
                stack.push_back(v);
            }
    while (!stack.empty()) {
        const int64_t v = stack.back();
        stack.pop_back();
        const int64_t born = p.born[v];
        if (born < 0) {
            failed = true;
            return;
        }
        if (recorded[born]) continue;
        recorded[born] = 1;
        for (const int64_t *r = reads.begin(born); r != reads.end(born); r++) {
            const bool moved = chosen[*r] && !remade[*r];
            if (moved || (p.born[*r] < 0 && !capturable(*r))) continue;
            if (remade[*r] || !capturable(*r)) stack.push_back(*r);
            else if (p.released[*r] >= 0 || !p.remakeable[*r]) captured[*r] = 1;
            else stack.push_back(*r);
        }
    }
    std::copy(p.released, p.released + p.values, lasting.begin());
    for (int64_t e = p.events - 1; e >= 0; e--) {
        if (!recorded[e]) continue;
        int64_t last = -1;
        for (const int64_t *w = writes.begin(e); w != writes.end(e); w++) last = std::max(last, lasting[*w]);
        for (const int64_t *r = reads.begin(e); r != reads.end(e); r++) lasting[*r] = std::max(lasting[*r], last);
    }
    for (int64_t v = 0; v < p.values; v++) ends[v] = std::max(p.held_until[v], lasting[v]);
}

bool Unit::present(int64_t v, int64_t e) const {
    if (chosen[v]) return absent_since[v] == NEVER && e <= ends[v];
    const int64_t end = captured[v] ? ends[v] : plain_end(v);
    return e <= std::min(end, p.overwritten[v]);
}

void Unit::leave(int64_t v, int64_t after) {
    present_until[v] = after;
    leaving.emplace(after, v);
}

void Unit::settle(int64_t e) {
    while (!leaving.empty() && leaving.top().first < e) {
        const auto [after, v] = leaving.top();
        leaving.pop();
        if (present_until[v] != after) continue;
        if (absent_since[v] == NEVER && after < ends[v]) {
            absent_since[v] = after + 1;
            absent_bytes += p.bytes[v];
            ending.emplace(ends[v], v);
            if (action[slots[v] + gap(v, after)] == MOVE && !board2[v]) {
                board2[v] = 1;
                seconds += p.write_seconds[v];
            }
        } else if (after >= ends[v]) {
            present_until[v] = FOREVER;
        }
    }
    while (!ending.empty() && ending.top().first < e) {
        const auto [end, v] = ending.top();
        ending.pop();
        if (absent_since[v] != NEVER) back(v, end);
    }
}

void Unit::back(int64_t v, int64_t e) {
    const int64_t since = absent_since[v];
    absent_since[v] = NEVER;
    absent_bytes -= p.bytes[v];
    if (since <= e) spans.push_back({v, since, e});
}

bool Unit::is_held(int64_t v, int64_t e) const {
    if (!chosen[v] || absent_since[v] == NEVER || e >= ends[v]) return false;
    const int64_t g = gap(v, e), slot = slots[v] + g;
    return action[slot] != KEEP && until[slot] <= e && g < needs(v);
}

void Unit::chain(int64_t v, int64_t e) {
    ops.clear();
    fetched.clear();
    seen_values.assign(1, v);
    seen[v] = 1;
    stack.assign(1, v);
    while (!stack.empty()) {
        const int64_t u = stack.back();
        stack.pop_back();
        if (board2[u]) {
            fetched.push_back(u);
            continue;
        }
        const int64_t born = p.born[u];
        if (born < 0 || !recorded[born]) {
            failed = true;
            break;
        }
        if (in_chain[born]) continue;
        in_chain[born] = 1;
        ops.push_back(born);
        for (const int64_t *r = reads.begin(born); r != reads.end(born); r++)
            if (!seen[*r] && !present(*r, e)) {
                seen[*r] = 1;
                seen_values.push_back(*r);
                stack.push_back(*r);
            }
    }
    for (int64_t u : seen_values) seen[u] = 0;
    for (int64_t op : ops) in_chain[op] = 0;
    std::sort(ops.begin(), ops.end());
}

int64_t Unit::meet(int64_t v, int64_t e, int64_t k, int64_t live, double *spent) {
    int64_t peak = live;
    if (absent_since[v] != NEVER) peak = remake(v, e, live, spent);
    const int64_t following = slots[v] + k + 1;
    if (action[following] == KEEP || until[following] <= e) present_until[v] = FOREVER;
    else leave(v, std::max(pin(v, k), p.held_until[v]));
    return peak;
}

int64_t Unit::remake(int64_t v, int64_t e, int64_t live, double *spent) {
    chain(v, e);
    if (failed) return live;
    fresh_values.clear();
    held_values.clear();
    const auto hold = [&](int64_t u) {
        fresh[u] = 1;
        fresh_values.push_back(u);
        if (u != v && is_held(u, e)) {
            held[u] = 1;
            held_values.push_back(u);
        }
    };
    for (int64_t at : ops)
        for (const int64_t *r = reads.begin(at); r != reads.end(at); r++) reader[*r] = at;
    for (int64_t u : fetched) {
        seconds += p.back_seconds[u];
        live += p.bytes[u];
        hold(u);
    }
    int64_t peak = live;
    for (int64_t at : ops) {
        seconds += p.again_seconds[at];
        int64_t clones = 0;
        for (const int64_t *old = overwrites.begin(at); old != overwrites.end(at); old++)
            if (!steals(*old, at)) clones += p.bytes[*old];
        peak = std::max(peak, live + clones + p.inside_bytes[at]);
        for (const int64_t *old = overwrites.begin(at); old != overwrites.end(at); old++)
            if (steals(*old, at)) {
                fresh[*old] = 0;
                live -= p.bytes[*old];
            }
        for (const int64_t *u = writes.begin(at); u != writes.end(at); u++) {
            if (spent != nullptr) spent[*u] += p.again_seconds[at];
            if (present(*u, e) || fresh[*u]) continue;
            if (*u == v || reader[*u] > at || is_held(*u, e)) {
                live += p.bytes[*u];
                hold(*u);
            }
        }
        size_t kept = 0;
        for (int64_t u : fresh_values) {
            if (!fresh[u]) continue;
            if (u != v && !held[u] && reader[u] <= at) {
                fresh[u] = 0;
                live -= p.bytes[u];
            } else {
                fresh_values[kept++] = u;
            }
        }
        fresh_values.resize(kept);
    }
    for (int64_t at : ops)
        for (const int64_t *r = reads.begin(at); r != reads.end(at); r++) reader[*r] = -1;
    for (int64_t u : fresh_values) fresh[u] = 0;
    back(v, e);
    for (int64_t u : held_values) {
        held[u] = 0;
        back(u, e);
        present_until[u] = FOREVER;
    }
    return peak;
}

std::unique_ptr<Outcome> Unit::play(const std::vector<Decision> &decisions, double *spent, int64_t *peaks) {
    begin();
    failed = !decide(decisions);
    if (!failed) close();
    if (failed) return nullptr;  // interrupted stays set: a chain may have ended half-way
    leaving = Heap();
    ending = Heap();
    absent_bytes = 0;
    seconds = 0.0;
    spans.clear();
    std::fill(present_until.begin(), present_until.end(), NEVER);
    std::fill(absent_since.begin(), absent_since.end(), NEVER);
    std::fill(board2.begin(), board2.end(), 0);

    std::vector<int64_t> base(p.events + 2, 0), gone(p.events + 2, 0);
    for (int64_t v = 0; v < p.values; v++) {
        const int64_t plain = plain_end(v);
        if ((chosen[v] || captured[v]) && ends[v] > plain) {
            base[plain + 1] += p.bytes[v];
            base[std::min(ends[v], p.events) + 1] -= p.bytes[v];
        }
    }
    int64_t sum = 0;
    for (int64_t e = 0; e < p.events; e++) {
        sum += base[e];
        base[e] = sum + p.plain_live[e];
    }

    struct Meeting {
        int64_t event, value, nth;
        auto operator<=>(const Meeting &) const = default;
    };
    std::vector<Meeting> meetings;
    for (int64_t v : away) {
        const int64_t first = p.gap_starts[v];
        if (action[slots[v] + first] != KEEP)
            leave(v, std::max({first ? pin(v, first - 1) : -1, p.held_until[v], p.born[v]}));
        for (int64_t k = 0; k < needs(v); k++) meetings.push_back({need(v, k), v, k});
    }
    std::sort(meetings.begin(), meetings.end());
    std::vector<Timed> chain_peaks;
    for (const Meeting &m : meetings) {
        settle(m.event);
        if (m.nth < p.gap_starts[m.value]) continue;
        chain_peaks.emplace_back(m.event, meet(m.value, m.event, m.nth, base[m.event] - absent_bytes, spent));
        if (failed) return nullptr;
    }
    settle(p.events + 1);
    for (int64_t v : away)
        if (absent_since[v] != NEVER && absent_since[v] <= ends[v])
            spans.push_back({v, absent_since[v], std::min(ends[v], p.events - 1)});
    for (const Span &s : spans) {
        gone[s.start] += p.bytes[s.value];
        gone[std::min(s.end, p.events) + 1] -= p.bytes[s.value];
    }
    sum = 0;
    for (int64_t e = 0; e < p.events; e++) {
        sum += gone[e];
        base[e] += p.rise[e] - sum;
    }
    for (const auto &[e, peak] : chain_peaks) base[e] = std::max(base[e], peak);

    auto outcome = std::make_unique<Outcome>();
    outcome->peak_event = std::max_element(base.begin(), base.begin() + p.events) - base.begin();
    outcome->peak_bytes = p.events ? std::max(p.base_bytes, base[outcome->peak_event]) : p.base_bytes;
    outcome->seconds = seconds;
    outcome->decisions = decisions;
    std::sort(outcome->decisions.begin(), outcome->decisions.end(), [](const Decision &a, const Decision &b) {
        return std::pair(a.value, a.gap) < std::pair(b.value, b.gap);
    });
    outcome->spans = spans;
    std::sort(outcome->spans.begin(), outcome->spans.end(), [](const Span &a, const Span &b) {
        return std::pair(a.value, a.start) < std::pair(b.value, b.start);
    });
    if (peaks != nullptr) std::copy(base.begin(), base.begin() + p.events, peaks);
    interrupted = false;
    return outcome;
}

void Unit::index_spans(const Outcome &from) {
    size_t at = 0;
    for (int64_t v = 0; v <= p.values; v++) {
        while (at < from.spans.size() && from.spans[at].value < v) at++;
        first_span[v] = static_cast<int64_t>(at);
    }
    first_span[p.values] = static_cast<int64_t>(from.spans.size());
}

bool Unit::absent(const Outcome &from, int64_t v, int64_t e) const {
    for (int64_t i = first_span[v]; i < first_span[v + 1]; i++)
        if (from.spans[i].start <= e && e <= from.spans[i].end) return true;
    return false;
}

// Whether an input costs a chain nothing: it is present, can be captured, or is recomputed anyway.
bool Unit::is_free(const Outcome &from, int64_t r, int64_t at) const {
    if (absent(from, r, at)) {
        const int64_t g = gap_before(r, at), slot = slots[r] + g;
        return g < needs(r) && action[slot] != KEEP && until[slot] <= at;
    }
    if (!capturable(r)) return at <= p.overwritten[r];
    return p.released[r] >= 0 || !p.remakeable[r] || p.held_until[r] >= at;
}

double Unit::chain_seconds(const Outcome &from, int64_t v, int64_t at, double limit) {
    double total = 0.0;
    ops.clear();
    seen_values.assign(1, v);
    seen[v] = 1;
    stack.assign(1, v);
    while (!stack.empty() && total <= limit) {
        const int64_t born = p.born[stack.back()];
        stack.pop_back();
        if (born < 0 || in_chain[born]) continue;
        in_chain[born] = 1;
        ops.push_back(born);
        total += p.again_seconds[born];
        for (const int64_t *r = reads.begin(born); r != reads.end(born); r++)
            if (!seen[*r] && !is_free(from, *r, at)) {
                seen[*r] = 1;
                seen_values.push_back(*r);
                stack.push_back(*r);
            }
    }
    for (int64_t u : seen_values) seen[u] = 0;
    for (int64_t op : ops) in_chain[op] = 0;
    return total;
}

bool Unit::offer(const Outcome &from, int64_t v, int64_t g, int64_t event, Offer &found) {
    const int64_t slot = slots[v] + g;
    if (action[slot] != KEEP && until[slot] > event) return false;
    const bool ends_here = g == needs(v);
    const double none = std::numeric_limits<double>::infinity();
    double moving = none, again = none;
    if (p.movable[v]) {
        const bool out = action[slots[v] + p.gap_starts[v]] == MOVE;
        if (out || g == p.gap_starts[v]) moving = ends_here ? 0.0 : p.back_seconds[v] + (out ? 0.0 : p.write_seconds[v]);
    }
    if (p.remakeable[v]) again = ends_here ? 0.0 : chain_seconds(from, v, need(v, g), moving);
    if (moving == none && !p.remakeable[v]) return false;
    const bool moved = moving != none && moving <= again;
    found = {{v, g, moved ? MOVE : RECOMPUTE, event + 1}, p.bytes[v], (moved ? moving : again) + 1e-9};
    return true;
}

std::unique_ptr<Outcome> Unit::move(const Outcome &from, int64_t step, const std::vector<std::pair<int64_t, int64_t>> &barred) {
    begin();
    failed = !decide(from.decisions);
    if (failed) return nullptr;
    index_spans(from);
    const int64_t event = from.peak_event;
    std::vector<Offer> offers;
    for (int64_t v = 0; v < p.values; v++) {
        if (p.released[v] < event || p.born[v] >= event || p.held_until[v] >= event || !p.bytes[v] || !p.open[v]) continue;
        const int64_t g = gap_before(v, event);
        if (g && pin(v, g - 1) >= event) continue;
        if (g < needs(v) && need(v, g) == event) continue;
        if (g < p.gap_starts[v] || absent(from, v, event)) continue;
        if (std::binary_search(barred.begin(), barred.end(), std::pair(v, g))) continue;
        Offer found;
        if (offer(from, v, g, event, found)) offers.push_back(found);
    }
    std::stable_sort(offers.begin(), offers.end(), [](const Offer &a, const Offer &b) {
        return a.seconds / static_cast<double>(a.freed) < b.seconds / static_cast<double>(b.freed);
    });
    std::vector<Decision> decisions = from.decisions;
    int64_t freed = 0;
    for (const Offer &o : offers) {
        const auto same = [&](const Decision &d) { return d.value == o.decision.value && d.gap == o.decision.gap; };
        const auto known = std::find_if(decisions.begin(), decisions.end(), same);
        if (known != decisions.end()) *known = o.decision;
        else decisions.push_back(o.decision);
        freed += o.freed;
        if (freed >= step) break;
    }
    interrupted = false;
    return freed ? play(decisions) : nullptr;
}

std::vector<Decision> given(int64_t n, const int64_t *rows) {
    std::vector<Decision> found(n);
    for (int64_t i = 0; i < n; i++) found[i] = {rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3]};
    return found;
}

}  // namespace

EXPORT void *lowtide_unit(const Laid *laid) {
    try {
        return new Unit(*laid);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

// Bytes of the layout that this library was built for.
EXPORT int64_t lowtide_laid_bytes() { return sizeof(Laid); }

EXPORT int lowtide_unit_failed(const void *unit) { return static_cast<const Unit *>(unit)->failed; }

EXPORT void lowtide_unit_free(void *unit) { delete static_cast<Unit *>(unit); }

// An outcome; null if the decisions cannot be carried out, or if there is no memory. `rows` has four numbers a decision.
EXPORT void *lowtide_unit_play(void *unit, int64_t n, const int64_t *rows) {
    try {
        return static_cast<Unit *>(unit)->play(given(n, rows)).release();
    } catch (const std::bad_alloc &) {
        static_cast<Unit *>(unit)->failed = true;
        return nullptr;
    }
}

// The next state of the walk, or null: there is none, or `lowtide_unit_failed`. `barred` has two numbers a key, sorted.
EXPORT void *lowtide_unit_move(void *unit, const void *from, int64_t step, int64_t n, const int64_t *barred) {
    try {
        std::vector<std::pair<int64_t, int64_t>> keys(n);
        for (int64_t i = 0; i < n; i++) keys[i] = {barred[2 * i], barred[2 * i + 1]};
        return static_cast<Unit *>(unit)->move(*static_cast<const Outcome *>(from), step, keys).release();
    } catch (const std::bad_alloc &) {
        static_cast<Unit *>(unit)->failed = true;
        return nullptr;
    }
}

// The highest bytes at each event, and the seconds that recomputing each value takes; whether there was memory for it.
EXPORT int lowtide_unit_look(void *unit, const void *outcome, int64_t *peaks, double *spent) {
    try {
        return static_cast<Unit *>(unit)->play(static_cast<const Outcome *>(outcome)->decisions, spent, peaks) != nullptr;
    } catch (const std::bad_alloc &) {
        return 0;
    }
}

EXPORT void lowtide_outcome(const void *outcome, int64_t *figures, double *seconds) {
    const Outcome &o = *static_cast<const Outcome *>(outcome);
    figures[0] = o.peak_bytes;
    figures[1] = o.peak_event;
    figures[2] = static_cast<int64_t>(o.decisions.size());
    *seconds = o.seconds;
}

EXPORT void lowtide_outcome_decisions(const void *outcome, int64_t *rows) {
    for (const Decision &d : static_cast<const Outcome *>(outcome)->decisions) {
        *rows++ = d.value;
        *rows++ = d.gap;
        *rows++ = d.action;
        *rows++ = d.until;
    }
}

EXPORT void lowtide_outcome_free(void *outcome) { delete static_cast<Outcome *>(outcome); }
