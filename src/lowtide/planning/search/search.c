/*
 * Local search over orders in which operators may run several times.
 *
 * A schedule is a row of slots; a slot holds one operator or is vacant, and an operator may stand in several (instances).
 * A value lives from each slot of its producer to the last use before the producer's next slot, so the bytes at every slot
 * follow from the row alone. A move relocates an instance, adds one or removes one. Simulated annealing weighs seconds against
 * bytes above the budget. Each move changes the lives of few values, so bytes change in a few ranges of slots. A move is
 * evaluated on these ranges only, and they are written only if it is accepted, which is rare.
 *
 * One file: a move costs only a handful of loads, so the compiler must be able to inline everything.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { COPIES = 24, LOG = 4096, CHAIN = 24, RIVALS = 4 };
/* COPIES: largest number of instances of one operator, or twice its number in a round's first row if that is larger.
   LOG: largest number of placements and removals in one move. CHAIN: deepest recursion of add_chain. RIVALS: largest number of
   random candidates among which a move picks the best. */
enum { LIFE = 0, STATE = 1, HOST = 2 };
enum { BLOCK = 64 }; /* slots that share an upper and a lower bound on their bytes */

/* The problem as arrays; operators from index `plain` on each fetch one value from the second board. */
typedef struct {
    int64_t ops, plain, values;
    const int32_t *out_at, *out, *in_at, *in, *use_at, *use;
    const int32_t *producer, *fetcher; /* value -> operator; fetcher -1: cannot be fetched */
    const uint8_t *kind;               /* value: LIFE, STATE of its producer, HOST copy of its producer's value */
    const double *bytes;               /* value */
    const double *seconds, *once, *workspace; /* operator; `once`: additional seconds of its first instance */
    const int32_t *overwriter;         /* value -> the operator that can take over its storage, or -1 */
    const uint8_t *again;              /* operator: may run more than once */
    const int32_t *pin;                /* value -> the operator until whose first instance it is held, or -1 */
    const int32_t *pinned_at, *pinned; /* operator -> values that are held until its first instance */
    double budget, host_budget, base;  /* bytes, bytes; base: seconds of the graph, the unit of the energy */
    int64_t fixed;                     /* first instances keep their order */
    int64_t last;                      /* the operator that stays after all others, or -1 */
} Game;

typedef struct { int32_t n, cap; int32_t *a, *b; } Lives;

/* The move that is being tried adds d bytes from slot t on. */
typedef struct { int32_t t; double d; } Step;

/* Bytes over the slots. */
typedef struct {
    double *at;                /* slot -> bytes */
    double *top, *low;         /* block -> upper and lower bound on the bytes of its slots */
    double over, limit;        /* over: bytes above the limit, summed over the slots that hold an operator */
    Step *steps; int32_t n, cap; /* of the current move; sorted by slot once it is settled */
    double change;             /* of `over` by the current move */
} Profile;

typedef struct {
    const Game *g;
    int64_t slots;
    int32_t *at;       /* slot -> operator or -1 */
    double *full;      /* slot -> 1.0 if it holds an operator, else 0.0 */
    int32_t *stand;    /* block -> number of its slots that hold an operator */
    double *more;      /* slot -> bytes more than in the slot before; scratch space of fill */
    Profile mem, host;
    double seconds;
    int32_t *count, *room, **pos, *ground; /* operator -> number of instances, its limit, their slots in order (in `ground`) */
    int32_t *places;           /* scratch space for the slots at which a value is placed */
    Lives *lives;
    int32_t *dup, *dup_at; int32_t dups;
    /* state of the move that is being tried */
    int32_t *touched; int32_t touches; uint32_t *mark, stamp;
    Lives *before;
    struct { int32_t op, slot; int8_t placed; } done[LOG]; int32_t dones;
    uint64_t rng;
} Search;

static uint64_t next(Search *s) {
    uint64_t x = s->rng;
    x ^= x << 13; x ^= x >> 7; x ^= x << 17;
    return s->rng = x;
}
static int64_t below(Search *s, int64_t n) { return (int64_t)((next(s) >> 11) % (uint64_t)n); }
static double unit(Search *s) { return (double)(next(s) >> 11) * 0x1p-53; }

static double above(double x) { return x > 0 ? x : 0; }
static double above_at(const Profile *p, int64_t t) { return above(p->at[t] - p->limit); }

/* The change of the sum of bytes above the limit if the slots from a to b get d more bytes each. */
__attribute__((target_clones("avx2", "default")))
static double rise(const double *restrict m, const double *restrict full, int64_t a, int64_t b, double d, double limit) {
    double change = 0;
    for (int64_t t = a; t <= b; t++) {
        double was = m[t] - limit, is = was + d;
        change += full[t] * ((is > 0 ? is : 0) - (was > 0 ? was : 0));
    }
    return change;
}

/* Largest and smallest number of bytes in the slots from a to b. */
__attribute__((target_clones("avx2", "default")))
static void bounds(const double *restrict m, int64_t a, int64_t b, double *top, double *low) {
    double most = m[a], least = m[a];
    for (int64_t t = a; t <= b; t++) {
        most = m[t] > most ? m[t] : most;
        least = m[t] < least ? m[t] : least;
    }
    *top = most;
    *low = least;
}

static void bound_block(const Search *s, Profile *p, int64_t k) {
    int64_t last = (k + 1) * BLOCK - 1;
    bounds(p->at, k * BLOCK, last < s->slots ? last : s->slots - 1, &p->top[k], &p->low[k]);
}

/* The same as `rise`, but blocks that stay wholly below or above the limit are not visited slot by slot. */
static double change_in(const Search *s, const Profile *p, int64_t a, int64_t b, double d) {
    double change = 0, up = d > 0 ? d : 0, down = d < 0 ? d : 0;
    for (int64_t k = a / BLOCK; k <= b / BLOCK; k++) {
        if (p->top[k] + up <= p->limit) continue;
        int64_t first = k * BLOCK, last = first + BLOCK - 1;
        if (first >= a && last <= b && p->low[k] + down >= p->limit) change += s->stand[k] * d;
        else change += rise(p->at, s->full, first < a ? a : first, last > b ? b : last, d, p->limit);
    }
    return change;
}

static void step(Profile *p, int32_t t, double d) {
    if (p->n == p->cap) {
        p->cap = p->cap ? 2 * p->cap : 256;
        p->steps = realloc(p->steps, sizeof(Step) * p->cap);
    }
    p->steps[p->n].t = t;
    p->steps[p->n++].d = d;
}

static int by_slot(const void *a, const void *b) { return (((const Step *)a)->t > ((const Step *)b)->t) - (((const Step *)a)->t < ((const Step *)b)->t); }

static void sort_steps(Profile *p) {
    if (p->n > 64) { qsort(p->steps, p->n, sizeof(Step), by_slot); return; }
    for (int32_t i = 1; i < p->n; i++) {
        Step x = p->steps[i];
        int32_t j = i;
        while (j && p->steps[j - 1].t > x.t) { p->steps[j] = p->steps[j - 1]; j--; }
        p->steps[j] = x;
    }
}

/* Sum up what the move's steps change; bytes are not written yet. */
static void weigh(const Search *s, Profile *p) {
    double d = 0;
    sort_steps(p);
    p->change = 0;
    for (int32_t i = 0; i + 1 < p->n; i++) {
        d += p->steps[i].d;
        if (d != 0 && p->steps[i + 1].t > p->steps[i].t) p->change += change_in(s, p, p->steps[i].t, p->steps[i + 1].t - 1, d);
    }
    p->over += p->change;
}

static void write_steps(const Search *s, Profile *p) {
    double d = 0;
    for (int32_t i = 0; i + 1 < p->n; i++) {
        d += p->steps[i].d;
        int64_t a = p->steps[i].t, b = p->steps[i + 1].t - 1;
        if (d == 0 || b < a) continue;
        for (int64_t t = a; t <= b; t++) p->at[t] += d;
        for (int64_t k = a / BLOCK; k <= b / BLOCK; k++) bound_block(s, p, k);
    }
}

static void add_slot(Profile *p, int64_t t, double d) {
    p->at[t] += d;
    if (p->at[t] > p->top[t / BLOCK]) p->top[t / BLOCK] = p->at[t];
    if (p->at[t] < p->low[t / BLOCK]) p->low[t / BLOCK] = p->at[t];
}

static void lives_room(Lives *l, int32_t n) {
    if (n <= l->cap) return;
    l->cap = n < 4 ? 4 : 2 * n;
    l->a = realloc(l->a, sizeof(int32_t) * l->cap);
    l->b = realloc(l->b, sizeof(int32_t) * l->cap);
}

/* The slots at which a value is placed on the board, in order: those of its producer and its fetcher. Returns their number. */
static int placings(const Search *s, int32_t v, int32_t *slots) {
    const Game *g = s->g;
    int32_t p = g->producer[v], f = g->fetcher[v], n = 0, i = 0, j = 0;
    int32_t np = s->count[p], nf = f < 0 ? 0 : s->count[f];
    while (i < np || j < nf)
        slots[n++] = j >= nf || (i < np && s->pos[p][i] < s->pos[f][j]) ? s->pos[p][i++] : s->pos[f][j++];
    return n;
}

static void compute_lives(const Search *s, int32_t v, Lives *l) {
    const Game *g = s->g;
    int32_t *slots = s->places;
    if (g->kind[v] == STATE) {
        int32_t p = g->producer[v];
        l->n = 0;
        if (s->count[p] > 1) { lives_room(l, 1); l->n = 1; l->a[0] = s->pos[p][0]; l->b[0] = s->pos[p][s->count[p] - 1]; }
        return;
    }
    if (g->kind[v] == HOST) {
        int32_t p = g->producer[v], f = g->fetcher[v];
        l->n = 0;
        if (s->count[f] && s->count[p]) { lives_room(l, 1); l->n = 1; l->a[0] = s->pos[p][0]; l->b[0] = s->pos[f][s->count[f] - 1]; }
        return;
    }
    int n = placings(s, v, slots);
    int32_t held = g->pin[v] >= 0 && s->count[g->pin[v]] ? s->pos[g->pin[v]][0] : -1;
    lives_room(l, n);
    l->n = n;
    for (int k = 0; k < n; k++) l->a[k] = l->b[k] = slots[k];
    for (int32_t u = g->use_at[v]; u < g->use_at[v + 1]; u++) {
        int32_t o = g->use[u];
        for (int32_t c = 0; c < s->count[o]; c++) {
            int32_t t = s->pos[o][c];
            int k = n - 1;
            while (k > 0 && slots[k] > t) k--;
            if (t <= held) k = 0;
            if (t > l->b[k]) l->b[k] = t;
        }
    }
    if (n && held > l->b[0]) l->b[0] = held;
    for (int k = 0; k < n; k++)
        if (l->b[k] > l->a[k] && s->at[l->b[k]] >= 0 && s->at[l->b[k]] == g->overwriter[v]) l->b[k]--;
}

/* Record the steps for the difference between a value's old and new lives. */
static void differ(Search *s, int32_t v, const Lives *from, const Lives *to) {
    Profile *p = s->g->kind[v] == HOST ? &s->host : &s->mem;
    double size = s->g->bytes[v];
    int32_t i = 0, m = from->n, n = to->n;
    if (size == 0) return;
    while (i < m && i < n && from->a[i] == to->a[i] && from->b[i] == to->b[i]) i++;
    while (m > i && n > i && from->a[m - 1] == to->a[n - 1] && from->b[m - 1] == to->b[n - 1]) { m--; n--; }
    for (int32_t k = i; k < m; k++) { step(p, from->a[k], -size); step(p, from->b[k] + 1, size); }
    for (int32_t k = i; k < n; k++) { step(p, to->a[k], size); step(p, to->b[k] + 1, -size); }
}

static void touch(Search *s, int32_t v) {
    if (s->mark[v] == s->stamp) return;
    s->mark[v] = s->stamp;
    s->touched[s->touches++] = v;
}

static void begin(Search *s) { s->stamp++; s->touches = 0; s->dones = 0; s->mem.n = s->host.n = 0; }

static void put(Search *s, int32_t o, int32_t t) {
    const Game *g = s->g;
    int32_t i = s->count[o]++;
    while (i && s->pos[o][i - 1] > t) { s->pos[o][i] = s->pos[o][i - 1]; i--; }
    s->pos[o][i] = t;
    s->at[t] = o;
    add_slot(&s->mem, t, g->workspace[o]);
    s->full[t] = 1.0;
    s->stand[t / BLOCK]++;
    s->mem.over += above_at(&s->mem, t);
    s->host.over += above_at(&s->host, t);
    s->seconds += g->seconds[o] + (s->count[o] == 1 ? g->once[o] : 0);
    if (s->count[o] == (o < g->plain ? 2 : 1)) { s->dup_at[o] = s->dups; s->dup[s->dups++] = o; }
}

static void take(Search *s, int32_t o, int32_t t) {
    const Game *g = s->g;
    int32_t i = 0;
    while (s->pos[o][i] != t) i++;
    s->count[o]--;
    for (; i < s->count[o]; i++) s->pos[o][i] = s->pos[o][i + 1];
    s->mem.over -= above_at(&s->mem, t);
    s->host.over -= above_at(&s->host, t);
    s->full[t] = 0.0;
    s->stand[t / BLOCK]--;
    add_slot(&s->mem, t, -g->workspace[o]);
    s->at[t] = -1;
    s->seconds -= g->seconds[o] + (s->count[o] == 0 ? g->once[o] : 0);
    if (s->count[o] == (o < g->plain ? 1 : 0)) {
        int32_t last = s->dup[--s->dups];
        s->dup[s->dup_at[o]] = last;
        s->dup_at[last] = s->dup_at[o];
    }
}

static void touch_op(Search *s, int32_t o) {
    const Game *g = s->g;
    for (int32_t i = g->out_at[o]; i < g->out_at[o + 1]; i++) touch(s, g->out[i]);
    for (int32_t i = g->in_at[o]; i < g->in_at[o + 1]; i++) touch(s, g->in[i]);
    for (int32_t i = g->pinned_at[o]; i < g->pinned_at[o + 1]; i++) touch(s, g->pinned[i]);
}

static int place(Search *s, int32_t o, int32_t t) {
    if (s->dones >= LOG || s->count[o] >= s->room[o]) return 0;
    put(s, o, t);
    s->done[s->dones].op = o; s->done[s->dones].slot = t; s->done[s->dones++].placed = 1;
    touch_op(s, o);
    return 1;
}

static int withdraw(Search *s, int32_t o, int32_t t) {
    if (s->dones >= LOG) return 0;
    take(s, o, t);
    s->done[s->dones].op = o; s->done[s->dones].slot = t; s->done[s->dones++].placed = 0;
    touch_op(s, o);
    return 1;
}

/* Recompute the lives of touched values and evaluate the move; `keep` or `undo` must follow. */
static void settle(Search *s) {
    for (int32_t i = 0; i < s->touches; i++) {
        int32_t v = s->touched[i];
        Lives *old = &s->before[v], fresh = *old;
        /* swap buffers: the old lives become `before` */
        *old = s->lives[v];
        compute_lives(s, v, &fresh);
        s->lives[v] = fresh;
        differ(s, v, old, &s->lives[v]);
    }
    weigh(s, &s->mem);
    weigh(s, &s->host);
}

static void keep(Search *s) {
    write_steps(s, &s->mem);
    write_steps(s, &s->host);
}

static void undo(Search *s, int settled) {
    if (settled) {
        s->mem.over -= s->mem.change;
        s->host.over -= s->host.change;
        for (int32_t i = 0; i < s->touches; i++) {
            int32_t v = s->touched[i];
            Lives x = s->lives[v]; s->lives[v] = s->before[v]; s->before[v] = x;
        }
    }
    for (int32_t i = s->dones - 1; i >= 0; i--)
        if (s->done[i].placed) take(s, s->done[i].op, s->done[i].slot);
        else put(s, s->done[i].op, s->done[i].slot);
}

/* Operator o may stand only after this slot: the last of the first instances of what it reads. */
static int32_t earliest(const Search *s, int32_t o) {
    const Game *g = s->g;
    int32_t lo = -1;
    for (int32_t i = g->in_at[o]; i < g->in_at[o + 1]; i++) {
        int32_t t = s->pos[g->producer[g->in[i]]][0];
        if (t > lo) lo = t;
    }
    if (o >= g->plain) { int32_t p = g->producer[g->out[g->out_at[o]]]; if (s->pos[p][0] > lo) lo = s->pos[p][0]; }
    return lo;
}

/* All instances stand before this slot: that of the last operator if there is one, otherwise the end of the row. */
static int32_t end_of(const Search *s) {
    return s->g->last >= 0 ? s->pos[s->g->last][0] : (int32_t)s->slots;
}

/* The first instance of operator o must stand before this slot: the earliest first instance of its readers. */
static int32_t latest(const Search *s, int32_t o) {
    const Game *g = s->g;
    int32_t hi = end_of(s);
    for (int32_t i = g->out_at[o]; i < g->out_at[o + 1]; i++) {
        int32_t v = g->out[i];
        if (g->kind[v] != LIFE) continue;
        for (int32_t u = g->use_at[v]; u < g->use_at[v + 1]; u++) {
            int32_t t = s->pos[g->use[u]][0];
            if (t < hi) hi = t;
        }
        if (g->fetcher[v] >= 0 && s->count[g->fetcher[v]] && s->pos[g->fetcher[v]][0] < hi) hi = s->pos[g->fetcher[v]][0];
    }
    return hi;
}

/* A vacant slot near t, strictly between lo and hi; -1 if none is found. */
static int32_t vacant(const Search *s, int32_t lo, int32_t hi, int32_t t) {
    if (hi - lo < 2) return -1;
    if (t <= lo) t = lo + 1;
    if (t >= hi) t = hi - 1;
    for (int32_t d = 0; d < 48; d++) {
        if (t - d > lo && s->at[t - d] < 0) return t - d;
        if (t + d < hi && s->at[t + d] < 0) return t + d;
    }
    return -1;
}

static int alive(const Search *s, int32_t v, int32_t t) {
    const Lives *l = &s->lives[v];
    for (int k = 0; k < l->n; k++) if (l->a[k] < t && t <= l->b[k]) return 1;
    return 0;
}

static int relocate(Search *s) {
    const Game *g = s->g;
    int32_t t = -1;
    for (int i = 0; i < 64; i++) { t = (int32_t)below(s, s->slots); if (s->at[t] >= 0) break; }
    if (t < 0 || s->at[t] < 0) return 0;
    int32_t o = s->at[t], lo, hi, to;
    if (o == g->last) return 0;
    int32_t c = 0;
    while (s->pos[o][c] != t) c++;
    if (c == 0 && o < g->plain) {
        if (g->fixed) return 0;
        lo = earliest(s, o); hi = latest(s, o);
        if (s->count[o] > 1 && s->pos[o][1] < hi) hi = s->pos[o][1];
    } else {
        lo = c ? s->pos[o][c - 1] : earliest(s, o);
        int32_t e = earliest(s, o);
        if (e > lo) lo = e;
        hi = c + 1 < s->count[o] ? s->pos[o][c + 1] : end_of(s);
    }
    if (hi - lo < 3) return 0;
    if (unit(s) < 0.3) to = lo + 1 + (int32_t)below(s, hi - lo - 1);
    else {
        double span = exp(unit(s) * log((double)(hi - lo)));
        to = t + (int32_t)((next(s) & 1) ? span + 1 : -span - 1);
    }
    to = vacant(s, lo, hi, to);
    if (to < 0) return 0;
    return withdraw(s, o, t) && place(s, o, to);
}

static int add_chain(Search *s, int32_t o, int32_t before, int depth) {
    const Game *g = s->g;
    if (!g->again[o] || s->count[o] >= s->room[o] || depth > CHAIN) return 0;
    int32_t lo = earliest(s, o);
    if (o < g->plain && s->pos[o][0] > lo) lo = s->pos[o][0];
    int32_t t = vacant(s, lo, before, before - 1);
    if (t < 0) return 0;
    if (!place(s, o, t)) return 0;
    for (int32_t i = g->in_at[o]; i < g->in_at[o + 1]; i++) {
        int32_t v = g->in[i];
        if (alive(s, v, t)) continue;
        double p = unit(s);
        if (p < 0.6) {
            int32_t q = g->producer[v];
            int covered = 0;
            for (int32_t k = 0; k < s->dones; k++) if (s->done[k].op == q && s->done[k].placed && s->done[k].slot < t) covered = 1;
            if (!covered && g->again[q]) add_chain(s, q, t, depth + 1);
        } else if (p < 0.7 && g->fetcher[v] >= 0) add_chain(s, g->fetcher[v], t, depth + 1);
    }
    return 1;
}

static int add(Search *s) {
    const Game *g = s->g;
    int32_t v = -1;
    /* pick a value that lives through a crowded slot, or any value */
    int32_t crowded = -1;
    if (s->mem.over > 0 && unit(s) < 0.7)
        for (int i = 0; i < 24; i++) { int32_t t = (int32_t)below(s, s->slots); if (s->at[t] >= 0 && above_at(&s->mem, t) > 0) { crowded = t; break; } }
    int rivals = 1 + (int)below(s, RIVALS);
    double worth = -1;
    for (int i = 0; i < 64 && rivals; i++) {
        int32_t w = (int32_t)below(s, g->values);
        if (g->kind[w] != LIFE || g->use_at[w] == g->use_at[w + 1]) continue;
        if (!g->again[g->producer[w]] && g->fetcher[w] < 0) continue;
        if (crowded >= 0 && !alive(s, w, crowded)) continue;
        rivals--;
        double cost = g->again[g->producer[w]] ? g->seconds[g->producer[w]] : g->seconds[g->fetcher[w]];
        double w_worth = g->bytes[w] / (cost + 1e-9 * g->base);
        if (w_worth > worth) { worth = w_worth; v = w; }
    }
    if (v < 0) return 0;
    int32_t o = g->producer[v];
    if (g->fetcher[v] >= 0 && (!g->again[o] || unit(s) < 0.5)) o = g->fetcher[v];
    if (!g->again[o] || s->count[o] >= s->room[o]) return 0;
    int32_t n = g->use_at[v + 1] - g->use_at[v];
    int32_t t = -1;
    if (crowded >= 0) {
        for (int32_t i = 0; i < n; i++) {
            int32_t q = g->use[g->use_at[v] + i];
            for (int32_t c = 0; c < s->count[q]; c++) { int32_t x = s->pos[q][c]; if (x > crowded && (t < 0 || x < t)) t = x; }
        }
    }
    if (t < 0) {
        int32_t q = g->use[g->use_at[v] + below(s, n)];
        if (!s->count[q]) return 0;
        t = s->pos[q][below(s, s->count[q])];
    }
    int32_t before = t;
    if (unit(s) < 0.2) { int32_t f = s->pos[g->producer[v]][0]; if (t - f > 2) before = f + 2 + (int32_t)below(s, t - f - 1); }
    return add_chain(s, o, before, 0);
}

static int drop(Search *s) {
    const Game *g = s->g;
    if (!s->dups) return 0;
    int32_t o = s->dup[below(s, s->dups)];
    for (int i = (int)below(s, RIVALS); i > 0; i--) {
        int32_t q = s->dup[below(s, s->dups)];
        if (g->seconds[q] > g->seconds[o]) o = q;
    }
    int32_t c = (int32_t)below(s, s->count[o]);
    if (c == 0 && o < g->plain) {
        if (g->fixed) { c = 1 + (int32_t)below(s, s->count[o] - 1); }
        else {
            /* the next instance becomes the first: all readers must come after it */
            int32_t hi = latest(s, o);
            if (s->pos[o][1] >= hi) c = 1;
        }
    }
    if (!withdraw(s, o, s->pos[o][c])) return 0;
    return 1;
}

/* After a removal, also remove instances that computed its inputs and that nothing uses any more. */
static void tidy(Search *s) {
    const Game *g = s->g;
    for (int32_t i = 0; i < s->dones && i < LOG - 64; i++) {
        if (s->done[i].placed) continue;
        int32_t o = s->done[i].op;
        for (int32_t j = g->in_at[o]; j < g->in_at[o + 1]; j++) {
            int32_t v = g->in[j];
            for (int side = 0; side < 2; side++) {
                int32_t q = side ? g->fetcher[v] : g->producer[v];
                if (q < 0) continue;
                for (int32_t c = q < g->plain ? 1 : 0; c < s->count[q]; c++) {
                    int32_t t = s->pos[q][c];
                    int used = 0;
                    for (int32_t k = g->out_at[q]; k < g->out_at[q + 1] && !used; k++) {
                        int32_t w = g->out[k];
                        if (g->kind[w] != LIFE) continue;
                        int32_t stop = (int32_t)s->slots, *slots = s->places;
                        int n = placings(s, w, slots);
                        for (int x = 0; x < n; x++) if (slots[x] > t) { stop = slots[x]; break; }
                        for (int32_t u = g->use_at[w]; u < g->use_at[w + 1] && !used; u++)
                            for (int32_t x = 0; x < s->count[g->use[u]]; x++) {
                                int32_t y = s->pos[g->use[u]][x];
                                if (y > t && y < stop) { used = 1; break; }
                            }
                    }
                    if (!used) { if (!withdraw(s, q, t)) return; c--; }
                }
            }
        }
    }
}

static int64_t blocks_of(int64_t slots) { return (slots + BLOCK - 1) / BLOCK; }

static double over_of(const Search *s) { return s->mem.over + s->host.over; }

/* Recompute a profile from the lives of its values; `at` already holds the workspaces. */
static void fill(Search *s, Profile *p) {
    const Game *g = s->g;
    double *more = s->more, sum = 0;
    memset(more, 0, sizeof(double) * (s->slots + 1));
    for (int32_t v = 0; v < g->values; v++)
        if ((g->kind[v] == HOST) == (p == &s->host))
            for (int k = 0; k < s->lives[v].n; k++) {
                more[s->lives[v].a[k]] += g->bytes[v];
                more[s->lives[v].b[k] + 1] -= g->bytes[v];
            }
    p->over = 0;
    for (int64_t t = 0; t < s->slots; t++) {
        p->at[t] += sum += more[t];
        if (s->at[t] >= 0) p->over += above_at(p, t);
    }
    for (int64_t k = 0; k < blocks_of(s->slots); k++) bound_block(s, p, k);
}

/* Spread a row evenly over the slots and recompute everything. */
static void lay(Search *s, const int32_t *row, int64_t length) {
    const Game *g = s->g;
    memset(s->count, 0, sizeof(int32_t) * g->ops);
    memset(s->stand, 0, sizeof(int32_t) * blocks_of(s->slots));
    for (int64_t t = 0; t < s->slots; t++) { s->at[t] = -1; s->full[t] = 0; s->mem.at[t] = 0; s->host.at[t] = 0; }
    s->seconds = 0;
    s->dups = 0;
    for (int64_t i = 0; i < length; i++) {
        int32_t t = (int32_t)((2 * i + 1) * s->slots / (2 * length));
        put(s, row[i], t);
    }
    for (int32_t v = 0; v < g->values; v++) compute_lives(s, v, &s->lives[v]);
    fill(s, &s->mem);
    fill(s, &s->host);
}

static int64_t row_of(const Search *s, int32_t *row) {
    int64_t n = 0;
    for (int64_t t = 0; t < s->slots; t++) if (s->at[t] >= 0) row[n++] = s->at[t];
    return n;
}

static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }

/* Remove instances whose removal does not raise the bytes above the budget. */
static void prune(Search *s) {
    const Game *g = s->g;
    for (int32_t o = 0; o < g->ops; o++)
        for (int32_t c = o < g->plain ? 1 : 0; c < s->count[o]; c++) {
            double over = over_of(s);
            begin(s);
            if (!withdraw(s, o, s->pos[o][c])) { undo(s, 0); continue; }
            tidy(s);
            settle(s);
            if (over_of(s) > over + 0.5) { undo(s, 1); continue; }
            keep(s);
            c = o < g->plain ? 0 : -1;
        }
}

static int make_profile(Profile *p, int64_t slots, double limit) {
    p->at = malloc(sizeof(double) * slots);
    p->top = calloc(blocks_of(slots), sizeof(double));
    p->low = calloc(blocks_of(slots), sizeof(double));
    p->limit = limit;
    return p->at && p->top && p->low;
}

static void destroy_profile(Profile *p) { free(p->at); free(p->top); free(p->low); free(p->steps); }

/* Allocate the slots of every operator's instances, enough for those of the row. Returns 0 if memory runs out. */
static int make_room(Search *s, const int32_t *row, int64_t length) {
    const Game *g = s->g;
    int64_t all = 0;
    s->room = calloc(g->ops, sizeof(int32_t));
    s->pos = malloc(sizeof(int32_t *) * g->ops);
    s->places = malloc(sizeof(int32_t) * s->slots);
    if (!s->room || !s->pos || !s->places) return 0;
    for (int64_t i = 0; i < length; i++) s->room[row[i]] += 2;
    for (int64_t o = 0; o < g->ops; o++) {
        if (s->room[o] < COPIES) s->room[o] = COPIES;
        all += s->room[o];
    }
    s->ground = malloc(sizeof(int32_t) * all);
    if (!s->ground) return 0;
    all = 0;
    for (int64_t o = 0; o < g->ops; o++) { s->pos[o] = s->ground + all; all += s->room[o]; }
    return 1;
}

static int make(Search *s, const Game *g, const int32_t *row, int64_t length, int64_t slots, uint64_t seed) {
    memset(s, 0, sizeof *s);
    s->g = g;
    s->slots = slots;
    s->at = malloc(sizeof(int32_t) * slots);
    s->full = malloc(sizeof(double) * slots);
    s->stand = malloc(sizeof(int32_t) * blocks_of(slots));
    s->more = malloc(sizeof(double) * (slots + 1));
    int profiles = make_profile(&s->mem, slots, g->budget) & make_profile(&s->host, slots, g->host_budget);
    s->count = calloc(g->ops, sizeof(int32_t));
    int rooms = make_room(s, row, length);
    s->lives = calloc(g->values, sizeof(Lives));
    s->before = calloc(g->values, sizeof(Lives));
    s->dup = malloc(sizeof(int32_t) * g->ops);
    s->dup_at = malloc(sizeof(int32_t) * g->ops);
    s->touched = malloc(sizeof(int32_t) * g->values);
    s->mark = calloc(g->values, sizeof(uint32_t));
    s->rng = seed * 0x9E3779B97F4A7C15ull + 0x1234567;
    return profiles && rooms && s->at && s->full && s->stand && s->more && s->count && s->lives && s->before && s->dup && s->dup_at &&
           s->touched && s->mark;
}

static void destroy(Search *s) {
    for (int32_t v = 0; v < s->g->values; v++) {
        if (s->lives) { free(s->lives[v].a); free(s->lives[v].b); }
        if (s->before) { free(s->before[v].a); free(s->before[v].b); }
    }
    free(s->at); free(s->full); free(s->stand); free(s->more); free(s->count); free(s->lives); free(s->before);
    free(s->dup); free(s->dup_at); free(s->touched); free(s->mark);
    free(s->room); free(s->pos); free(s->ground); free(s->places);
    destroy_profile(&s->mem);
    destroy_profile(&s->host);
}

static double energy(const Search *s, double weight) {
    return s->seconds / s->g->base + weight * over_of(s) / s->g->budget;
}

/* Input and output of one round; see annealing.py (Annealer.round) for the meaning of the fields. */
typedef struct {
    int64_t moves;
    double hot, cold, weight; /* weight: initial weight of the bytes above the budget */
    int64_t copies;
    double target, deadline; /* seconds of the row; time of the monotonic clock */
    uint64_t seed;
    double seconds, over;    /* output: those of the best row */
    int64_t tried;           /* output: number of moves */
} Round;

/* Anneal from `row` (*length entries, room for `slots`) and write the best row back. Returns 0 if memory runs out. */
__attribute__((visibility("default")))
int lowtide_anneal(const Game *g, int32_t *row, int64_t *length, int64_t slots, Round *r) {
    Search s;
    int32_t *best = malloc(sizeof(int32_t) * slots), *work = malloc(sizeof(int32_t) * slots);
    if (!make(&s, g, row, *length, slots, r->seed) || !best || !work) { destroy(&s); free(best); free(work); return 0; }
    int64_t best_n = *length, n;
    memcpy(best, row, sizeof(int32_t) * best_n);
    lay(&s, row, *length);
    double top = s.seconds, least = over_of(&s), weight = r->weight, heat = r->hot, last_over = least;
    double cooling = pow(r->cold / r->hot, 1024.0 / (double)(r->moves > 1024 ? r->moves : 1024));
    int64_t i;
    for (i = 0; i < r->moves; i++) {
        if ((i & 1023) == 0) {
            if (now() > r->deadline || (least <= 0 && top <= r->target)) break;
            if (i) heat *= cooling;
            if (r->copies) {
                double over = over_of(&s);
                if (over <= 0) weight *= 0.95;
                else if (over > 0.98 * last_over) weight *= 1.05;
                last_over = over;
                if (weight > 1e4) weight = 1e4;
                if (weight < 1e-8) weight = 1e-8;
            }
            if ((i & 0x3fff) == 0 && i) {
                n = row_of(&s, work);
                if (n * 10 < slots * 9) lay(&s, work, n);
            }
        }
        begin(&s);
        double was = energy(&s, weight), kind = unit(&s);
        int ok, removed = 0;
        if (!r->copies || kind < (g->fixed ? 0.2 : 0.5)) ok = relocate(&s);
        else if (kind < (g->fixed ? 0.6 : 0.75)) ok = add(&s);
        else { ok = drop(&s); removed = 1; }
        if (!ok) { undo(&s, 0); continue; }
        if (removed) tidy(&s);
        settle(&s);
        double d = energy(&s, weight) - was;
        if (d > 0 && unit(&s) >= exp(-d / heat)) { undo(&s, 1); continue; }
        keep(&s);
        double over = over_of(&s);
        if (over < 0.5) over = 0;
        if (over < 0.999 * least || (over <= least && s.seconds < top * (1 - 1e-12))) {
            least = over;
            top = s.seconds;
            best_n = row_of(&s, best);
        }
    }
    if (r->copies) {
        lay(&s, best, best_n);
        prune(&s);
        best_n = row_of(&s, best);
        top = s.seconds;
        least = over_of(&s);
    }
    memcpy(row, best, sizeof(int32_t) * best_n);
    *length = best_n;
    r->seconds = top;
    r->over = least < 0.5 ? 0 : least;
    r->tried = i;
    destroy(&s);
    free(best); free(work);
    return 1;
}
