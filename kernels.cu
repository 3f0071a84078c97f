/*
kernels.cu: lossless verification as one fused CUDA kernel, from the target's raw logits to accepted length and next token
(DSpark, arXiv 2607.05147, Sec. 2.1). It is verify.py's rule, and verify.py is its reference: same uniforms, same ids
(but where u is within rounding of an edge of the CDF).

    n_accepted, next_token = verify_tokens(softmax(logits / temperature), p_draft, tokens, verify_len, u, draft_ids)

In PyTorch that softmax and what follows pass about ten times over memory, and write probabilities that are read once.
In version 3 a row of logits is read for its normaliser (the sum of its exponentials), again where a residual is drawn, and in no
version is anything V wide written, or a row after a request's first rejection read at all.

Versions, from naive to fast. Times: still to be measured, there was no GPU at hand (docs/kernel.md counts bytes and floors).
    1  one thread per request          plain C in a loop: read this one to learn the rule
    2  one block per request           its threads share every row; neighbours read neighbouring addresses
    3  several blocks per row          16-byte loads, one pass for maximum and sum, a queue that feeds rows as they are wanted

Build    nvcc -O3 -std=c++17 -arch=sm_90 -cubin -Xptxas -v kernels.cu        seconds: no torch header is included
         verify.py builds it with the binding at the end of this file, once, through torch.utils.cpp_extension
Test     python -m pytest tests/test_kernels.py      runs this very source on a CPU, no GPU needed

CUDA in a few words. A kernel (__global__) is a function that many threads run at once; __device__ marks what it may call.
kernel<<<blocks, threads, 0, stream>>>(..) starts that many blocks of that many threads; kernels of one stream run one after the
other. A thread knows its blockIdx.x, its threadIdx.x in the block, and blockDim.x, the threads per block.
    warp    32 neighbouring threads of a block, in step. If their 32 addresses are neighbours too, memory answers them together,
            else piece by piece. They can read each other's variables (__shfl_.._sync).
    block   several warps on one multiprocessor, with a small fast memory in common (__shared__) and a barrier: __syncthreads
            lets none pass before all have come.
    global  memory is all the rest: every block sees it, and a load takes some thousand clocks. atomicAdd and its like change a
            number in one indivisible step and return the old one. __threadfence: what I wrote before it is seen before what I
            write after it.
An H200 has 132 multiprocessors with room for 2,048 threads each. Blocks begin in any order, as room comes free: one may never
wait for a block that has not begun.

Letters  R requests, G draft positions, V vocabulary, K drafter's vocabulary, N = sum(1 + verify_len) rows, C chunks per row.
         In README's picture G = 7 and verify_len = 4: five rows. Row 0, the target's word after x0, judges tokens[0] = x1; row 4 is
         for the token after x4 (the bonus), drawn if all four pass. After a rejection the token drawn is called the correction.
Limits   temperature yes; top-k and top-p need a sort, verify.py sends such requests through PyTorch.
*/
#include <math.h>
#include <stdint.h>

#ifndef BLOCK
#define BLOCK 256  // threads per block in versions 2 and 3; a multiple of 32
#endif
// Two pieces of CUDA are not C++ even after a #define, so they go by macros that the CPU tests can define in their own way.
#ifndef LAUNCH
#define LAUNCH(kernel, blocks, threads, stream) kernel<<<blocks, threads, 0, stream>>>
#define SHARED(type, name) __shared__ type name
#endif

// What a request can be refused for. A refused request gets next_token -1: a broken row must never become a token.
enum { FINE = 0, BAD_LOGITS = 1, BAD_DRAFT = 2, BAD_ARGUMENT = 3 };

struct Batch {  // everything in global memory, row-major; outputs last
    int R, G, V, K, N;
    const void* logits;         // (N, V) float or bf16; row k of a request judges its token k, its last row is for the bonus
    const float* temperature;   // (R,)  0 is greedy
    const float* p_draft;       // (R, G, K) the very numbers that tokens were drawn from
    const int64_t* draft_ids;   // (K,) target ids of its columns, ascending; null: all of them, K = V
    const int64_t* tokens;      // (R, G) target ids
    const int64_t* verify_len;  // (R,)  0..G
    const double* u;            // (R, G+1) uniforms in [0, 1): u[r, k] judges tokens[r, k], u[r, G] draws next_token
    int64_t* n_accepted;        // (R,)
    int64_t* next_token;        // (R,)
    int* error;                 // (R,) FINE or why not
};

// ---------------------------------------------------------------------------------------------------------------------
// The rule, the same for all versions. On a first reading skip to version 1 and come back for each name.
// template <typename T>: written once, compiled for float and for bf16.

struct bf16 {
    uint16_t bits;  // the upper half of a float: that is all there is to it
};
__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }

__device__ inline float scale_of(float temperature) {
    // exp((l - top) / T) = 2^((l - top) * scale): the hardware has 2^x. Greedy rows go through the same softmax at T = 1, which
    // finds their NaNs. 1 / T may be infinite, and 0 * inf is NaN just at the maximum, so stop short of it.
    const float log2_e = 1.44269504f;
    return temperature == 0 ? log2_e : fminf(log2_e / temperature, 3.4e38f);
}

__device__ inline int lower_bound(const int64_t* ids, int K, int64_t v) {  // first column whose id is not below v
    int low = 0, high = K;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (ids[middle] < v) low = middle + 1; else high = middle;
    }
    return low;
}

// One target row as weights to draw from: p_target, or the residual max(p_target - p_draft, 0). Neither needs to sum to 1.
template <typename T>
struct Row {
    const T* logits;       // (V,)
    float top, scale;      // the row's maximum; see scale_of
    float unit;            // 1 / normaliser, or 1 where the scale does not matter
    int best;              // greedy: the argmax, and p_target is one-hot there. -1: not greedy
    const float* p_draft;  // (K,) to be taken off, or null: a plain draw
    const int64_t* ids;    // (K,) or null
    int K;

    __device__ float target(int v) const {
        if (best >= 0) return v == best ? 1.0f : 0.0f;
        return exp2f((to_float(logits[v]) - top) * scale) * unit;
    }
    // p_draft(v). Ids are asked for in rising order, so the column only moves forward: a merge instead of a search.
    __device__ float draft(int v, int& column) const {
        if (!ids) return p_draft[v];
        while (column < K && ids[column] < v) column++;
        return column < K && ids[column] == v ? p_draft[column] : 0.0f;
    }
    __device__ int first_column(int v) const { return ids ? lower_bound(ids, K, v) : 0; }
    __device__ float weight(int v, int& column) const {
        if (!p_draft) return target(v);
        const float w = target(v) - draft(v, column);
        return w < 0 ? 0.0f : w;  // not fmaxf(w, 0): that would turn NaN into 0
    }
    // Sum of the weights of ids [from, to). In double: near 1 a float sum moves in steps larger than a tail token's weight.
    __device__ double mass(int from, int to) const {
        double sum = 0;
        int column = p_draft ? first_column(from) : 0;
        for (int v = from; v < to; v++) sum += weight(v, column);
        return sum;
    }
    // Inverse CDF in id order: the first id in [from, to) at which the running sum exceeds point. Rounding may leave nothing
    // that does; then the last id with any weight. Never an id of weight 0; -1 if all have none.
    __device__ int walk(int from, int to, double running, double point) const {
        int last = -1;
        int column = p_draft ? first_column(from) : 0;
        for (int v = from; v < to; v++) {
            const float w = weight(v, column);
            if (!(w > 0)) continue;
            running += w;
            last = v;
            if (running > point) break;
        }
        return last;
    }
};

__device__ inline bool is_normaliser(double sum) {
    // The row's maximum adds 1, so a healthy sum is at least that. NaN or +inf leave NaN; nothing but -inf leaves NaN or (version 3) 0.
    return sum > 0 && sum < INFINITY;
}

__device__ inline int first_row(const Batch& b, int r) {  // where the packed rows of request r begin
    int64_t row = 0;
    for (int i = 0; i < r; i++) row += 1 + b.verify_len[i];
    return row < 0 || row > b.N ? b.N : (int)row;  // N is out of range, which refuse() sees
}

__device__ inline int refuse(const Batch& b, int r, int first) {
    // The asserts of verify_tokens on values, but for draft_ids' order. The host must not wait for the GPU only to read these numbers, so they are looked at here.
    const float t = b.temperature[r];
    const int64_t len = b.verify_len[r];
    bool good = t >= 0 && t < INFINITY && len >= 0 && len <= b.G && first + len < b.N;
    if (r == b.R - 1) good = good && first + len + 1 == b.N;
    for (int k = 0; k < b.G; k++) good = good && b.tokens[(size_t)r * b.G + k] >= 0 && b.tokens[(size_t)r * b.G + k] < b.V;
    for (int k = 0; k <= b.G; k++) good = good && b.u[(size_t)r * (b.G + 1) + k] >= 0 && b.u[(size_t)r * (b.G + 1) + k] < 1;
    return good ? FINE : BAD_ARGUMENT;
}

template <typename T>
__device__ Row<T> row_of(const Batch& b, int r, int first, int k) {
    const T* logits = (const T*)b.logits + (size_t)(first + k) * b.V;
    return {logits, -INFINITY, scale_of(b.temperature[r]), 1.0f, -1, nullptr, b.draft_ids, b.K};
}
__device__ inline const float* draft_row(const Batch& b, int r, int k) { return b.p_draft + ((size_t)r * b.G + k) * b.K; }

enum Verdict { ACCEPTED, REJECTED, BROKEN };

// Is tokens[r, k] accepted? The row must know its maximum, unit = 1 / normaliser, and best if greedy.
template <typename T>
__device__ Verdict judge(const Batch& b, int r, int k, Row<T> row) {
    const int x = (int)b.tokens[(size_t)r * b.G + k];
    row.p_draft = draft_row(b, r, k);
    int column = row.first_column(x);
    const float p_draft = row.draft(x, column);
    if (!(p_draft >= 0 && p_draft < INFINITY)) return BROKEN;  // NaN fails every comparison: it would pass as a rejection
    // min(1, p_target / p_draft) > u without the division. Strict: u may be 0, and a token the target gives 0 must not pass
    return b.u[(size_t)r * (b.G + 1) + k] * (double)p_draft < (double)row.target(x) ? ACCEPTED : REJECTED;
}

__device__ inline void finish(const Batch& b, int r, int n_accepted, int id, int error) {  // by one thread
    if (error == FINE && id < 0) error = BAD_LOGITS;
    b.n_accepted[r] = n_accepted;
    b.next_token[r] = error == FINE ? id : -1;
    b.error[r] = error;
}

// ---------------------------------------------------------------------------------------------------------------------
// Version 1: one thread per request. No thread knows of another: this is the rule, left to right, as one would write it in C.
//
// Against PyTorch it writes nothing V wide and stops at the first rejection. Cost: R threads on a chip with room for 270,000,
// each waiting for memory again and again. A warp's threads read whole requests apart, so one load touches 32 pieces of memory
// and uses 2 or 4 bytes of each. And every row is passed over twice before its token can be judged, twice more for the draw.

template <typename T>
__global__ void verify1(Batch b) {
    const int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= b.R) return;  // the last block may be larger than what is left
    const int first = first_row(b, r);
    if (int error = refuse(b, r, first)) return finish(b, r, 0, -1, error);
    const int len = (int)b.verify_len[r];
    for (int k = 0;; k++) {
        Row<T> row = row_of<T>(b, r, first, k);
        int best = 0;
        for (int v = 0; v < b.V; v++) {  // pass 1: the maximum, so that the largest exponential is 2^0
            // strict: the lowest id among equals
            if (to_float(row.logits[v]) > row.top) row.top = to_float(row.logits[v]), best = v;
        }
        const double sum = row.mass(0, b.V);  // pass 2: the normaliser
        if (!is_normaliser(sum)) return finish(b, r, k, -1, BAD_LOGITS);
        if (b.temperature[r] == 0) row.best = best;
        if (k < len) {
            row.unit = (float)(1 / sum);
            const Verdict verdict = judge(b, r, k, row);
            if (verdict == BROKEN) return finish(b, r, k, -1, BAD_DRAFT);
            if (verdict == ACCEPTED) continue;
            row.p_draft = draft_row(b, r, k);  // the correction comes from the residual
        }
        // k == len: every scheduled token passed, and a plain draw follows (the bonus). p_draft stays null.
        double total = row.mass(0, b.V);  // pass 3 (for a bonus the same sum again: version 2 saves it)
        // NaN or -inf in p_draft. (A +inf at another id than the token's has weight 0, and is not looked for; verify.py refuses it.)
        if (!(total < INFINITY)) return finish(b, r, k, -1, BAD_DRAFT);
        if (total == 0) {  // not in the paper: rounding left no residual, so the two are equal, and p_target is the answer
            row.p_draft = nullptr;
            total = row.mass(0, b.V);
        }
        const double point = b.u[(size_t)r * (b.G + 1) + b.G] * total;
        return finish(b, r, k, row.walk(0, b.V, 0, point), FINE);  // pass 4
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// What the threads of one block do together

struct Shared {
    float warp_top[BLOCK / 32];      // block_max: one per warp
    double warp_sum[BLOCK / 32];     // block_sum, pick: likewise
    int least, first, last, id;      // block_min; pick: first piece past point, last with mass; draw's result
    int entry, chunk, arrived_last;  // version 3: what take() got; did this block bring the entry's last chunk?
    double base;                     // pick: the mass before the piece
};

__device__ inline float block_max(float x, Shared& s) {
    // In a warp: take the x of thread number ^ 16, then ^ 8, 4, 2, 1, and all 32 hold the maximum (0xffffffff: all 32 take part).
    for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    if (threadIdx.x % 32 == 0) s.warp_top[threadIdx.x / 32] = x;
    __syncthreads();  // all warps have written
    for (int i = 0; i < BLOCK / 32; i++) x = fmaxf(x, s.warp_top[i]);
    __syncthreads();  // all have read: the next call may write
    return x;
}

__device__ inline double block_sum(double x, Shared& s) {
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    if (threadIdx.x % 32 == 0) s.warp_sum[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0;  // every thread adds in the same order: all hold the same bits, and can take the same branch on them
    for (int i = 0; i < BLOCK / 32; i++) sum += s.warp_sum[i];
    __syncthreads();
    return sum;
}

__device__ inline int block_min(int x, Shared& s) {
    if (threadIdx.x == 0) s.least = x;
    __syncthreads();
    atomicMin(&s.least, x);
    __syncthreads();
    x = s.least;
    __syncthreads();
    return x;
}

// Thread i holds the mass of the i-th piece of a distribution. Which piece holds point? Returns its number (-1 if there is no
// mass at all), and leaves the mass before it in s.base.
__device__ inline int pick(double mass, double point, Shared& s) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;  // place in the warp, and which warp
    double after = mass;  // becomes the sum of pieces 0..i: first within the warp, by doubling the reach:
    // d = 1: sums of 2; d = 2: of 4; .. d = 16: of 32
    for (int d = 1; d < 32; d *= 2) {
        const double before = __shfl_up_sync(0xffffffffu, after, d);
        if (lane >= d) after += before;
    }
    if (lane == 31) s.warp_sum[warp] = after;
    if (threadIdx.x == 0) s.first = BLOCK, s.last = -1;
    __syncthreads();
    double before = 0;
    for (int i = 0; i < warp; i++) before += s.warp_sum[i];  // then the warps before this one
    after += before;
    // The same rule as walk's: first with any mass that exceeds point, else the last with any. Rounding cannot break it.
    if (mass > 0) {
        atomicMax(&s.last, (int)threadIdx.x);
        if (after > point) atomicMin(&s.first, (int)threadIdx.x);
    }
    __syncthreads();
    const int piece = s.first < BLOCK ? s.first : s.last;
    if ((int)threadIdx.x == piece) s.base = after - mass;
    __syncthreads();
    return piece;
}

// Draw from ids [from, to) of a row, where point is measured from their beginning. The ids are dealt out in contiguous slices,
// one per thread; a slice is picked by its mass, and its thread walks it. Contiguous, as the CDF runs in id order: a warp's reads
// are not neighbours here, but it happens once per request.
template <typename T>
__device__ int draw(const Row<T>& row, int from, int to, double point, Shared& s) {
    const int slice = (to - from + BLOCK - 1) / BLOCK;
    const int begin = min(to, from + (int)threadIdx.x * slice), end = min(to, begin + slice);
    const int piece = pick(row.mass(begin, end), point, s);
    if ((int)threadIdx.x == piece) s.id = row.walk(begin, end, s.base, point);
    __syncthreads();
    const int id = piece < 0 ? -1 : s.id;
    __syncthreads();
    return id;
}

// ---------------------------------------------------------------------------------------------------------------------
// Version 2: one block per request.
//
// It fixes version 1's idle chip and wasted reads: BLOCK threads share every pass over a row, thread i taking elements i,
// i + BLOCK, ..., so that the 32 threads of a warp read 32 neighbours, which memory delivers together.
//
// Cost: a row is passed over for its maximum, then for its sum (greedy: and for its argmax); a thread's load fetches 2 or 4 bytes;
// a residual searches draft_ids once per id; and R blocks keep R multiprocessors busy: at R = 1, 131 of an H200's 132 look on.

template <typename T>
__global__ void __launch_bounds__(BLOCK, 4) verify2(Batch b) {  // 4 blocks on a multiprocessor: at most 64 registers a thread
    SHARED(Shared, s);
    const int r = blockIdx.x, i = threadIdx.x;
    // Decisions are taken by all threads alike, from the same numbers: a __syncthreads that only some reach is a deadlock.
    const int first = first_row(b, r);
    if (int error = refuse(b, r, first)) {
        if (i == 0) finish(b, r, 0, -1, error);
        return;
    }
    const int len = (int)b.verify_len[r];
    int k = 0, id = -1, error = FINE;
    for (;; k++) {
        Row<T> row = row_of<T>(b, r, first, k);
        float top = -INFINITY;
        for (int v = i; v < b.V; v += BLOCK) top = fmaxf(top, to_float(row.logits[v]));
        row.top = block_max(top, s);
        double sum = 0;
        for (int v = i; v < b.V; v += BLOCK) sum += row.target(v);
        sum = block_sum(sum, s);
        if (!is_normaliser(sum)) { error = BAD_LOGITS; break; }
        if (b.temperature[r] == 0) {  // the lowest id among equals, as in the reference
            int mine = b.V;  // downwards, so that what stays is the thread's lowest
            for (int v = b.V - 1 - i; v >= 0; v -= BLOCK) if (to_float(row.logits[v]) == row.top) mine = v;
            row.best = block_min(mine, s);
        }
        if (k < len) {
            row.unit = (float)(1 / sum);
            const Verdict verdict = judge(b, r, k, row);
            if (verdict == BROKEN) { error = BAD_DRAFT; break; }
            if (verdict == ACCEPTED) continue;
            row.p_draft = draft_row(b, r, k);
        }
        double total = 0;
        if (row.p_draft) {
            for (int v = i; v < b.V; v += BLOCK) total += row.mass(v, v + 1);
            total = block_sum(total, s);
            if (!(total < INFINITY)) { error = BAD_DRAFT; break; }
            if (total == 0) row.p_draft = nullptr;
        }
        if (!row.p_draft) total = row.best < 0 ? sum * row.unit : 1;  // a plain draw: its total is known, no pass needed
        id = draw(row, 0, b.V, b.u[(size_t)r * (b.G + 1) + b.G] * total, s);
        break;
    }
    if (i == 0) finish(b, r, k, id, error);
}

// ---------------------------------------------------------------------------------------------------------------------
// Version 3: several blocks per row, each taking a chunk of it.
//
// It fixes version 2's second pass (maximum and sum in one, "online"), its small loads (16 bytes each, several in flight), and
// its idle multiprocessors at small R. The price is that blocks have to find each other. The row after an accepted token is
// wanted only once all chunks of this one are in, and blocks cannot be waited for as threads can. So work goes through a queue:
//
//     entry    request r wants its current row read (or its residual summed); C items, one per chunk
//     item     taken by whichever block is free, in order; the chunk's result goes to memory
//     verdict  the block that brings in an entry's last chunk combines the results, judges the token, and either appends
//              the request's next entry or draws next_token and is done with it
//
// A block that finds no entry waits for it. It holds a later ticket (take's item number) than all items in the queue, and those are held by blocks
// that run and wait for nothing, so it never waits in vain, however few blocks fit on the chip. Rows nobody wants are not read.

struct Work {  // version 3's scratch in global memory, laid out by lay_out()
    int C, width;           // chunks per row, at most BLOCK as one thread takes one (verify3); ids per chunk
    double *sum, *residual; // (R, C) per chunk: sum of exponentials against its own maximum; mass of the residual
    float *top;             // (R, C) per chunk: its maximum
    float *row_top, *unit;  // (R,) of the row whose residual is being drawn: maximum, 1 / normaliser
    int *first, *arrived;   // (R,) first packed row; chunks of the current entry that are in
    int *queue;             // (R * (G+1)) entries 1 + 2 r + (is it a residual), 0: not there yet. A request has at most G+1
    int *taken, *appended, *done;  // items taken, entries appended, requests finished
};

// One thread's maximum, and its sum of exponentials against that maximum. When the maximum rises, the sum shrinks to match. Logits 1, 3
// at scale 1: after 1 top = 1, sum = 1; at 3 top = 3, sum = 1 * 2^(1-3) + 1. The same sum as in two passes.
struct Online {
    float top = -INFINITY;
    double sum = 0;

    template <typename T>
    __device__ void add(const T* x, int n, float scale) {
        float high = to_float(x[0]);  // fmaxf skips NaN; the sum below keeps it
        for (int i = 1; i < n; i++) high = fmaxf(high, to_float(x[i]));
        if (high > top) {
            sum *= exp2f((top - high) * scale);  // the first time: 0 * 2^-inf = 0
            top = high;
        }
        const float base = top == -INFINITY ? 0 : top;  // -inf - -inf is NaN: a chunk may be masked out, a row may not
        float part = 0;  // few enough terms for a float, then the double keeps it
        for (int i = 0; i < n; i++) part += exp2f((to_float(x[i]) - base) * scale);
        sum += part;
    }
};

__device__ inline float shrink(float top, float higher, float scale) {  // from a sum against top to one against higher
    return top == higher ? 1.0f : exp2f((top - higher) * scale);        // equal -infs included
}

template <typename T>
union Pack {  // 16 bytes, one load instruction
    uint4 raw;
    T x[16 / sizeof(T)];
};

template <typename T>
__device__ Online scan(const T* x, int n, float scale) {  // n elements, shared out among the block
    Online online;
    const int per_load = 16 / sizeof(T), i = threadIdx.x;
    // 16-byte loads need addresses that are multiples of 16. Rows and chunks begin anywhere: what comes
    // before the first such address, and what is left after the last whole load, is done one by one.
    const int head = min(n, (int)((16 - (uintptr_t)x % 16) % 16 / sizeof(T)));
    const int loads = (n - head) / per_load, tail = head + loads * per_load;
    if (i < head) online.add(x + i, 1, scale);
    const uint4* body = (const uint4*)(x + head);
    const int ahead = 4;  // loads in flight per thread: memory answers after a thousand clocks, ask early. So two loops
    // below, unrolled: all four are under way before the first is used
    for (int j = i; j < loads; j += ahead * BLOCK) {
        Pack<T> pack[ahead];
#pragma unroll
        for (int a = 0; a < ahead; a++) if (j + a * BLOCK < loads) pack[a].raw = body[j + a * BLOCK];
#pragma unroll
        for (int a = 0; a < ahead; a++) if (j + a * BLOCK < loads) online.add(pack[a].x, per_load, scale);
    }
    if (tail + i < n) online.add(x + tail + i, 1, scale);
    return online;
}

__device__ inline void append(const Work& w, int r, bool residual) {  // by one thread: ask for request r's next entry
    atomicExch(&w.arrived[r], 0);
    __threadfence();  // all that was written for it is seen by whoever sees the entry
    atomicExch(&w.queue[atomicAdd(w.appended, 1)], 1 + 2 * r + residual);
}

// The next item -> its entry and chunk, or entry 0 if all requests are finished. By one thread.
__device__ inline void take(const Batch& b, const Work& w, Shared& s) {
    const int item = atomicAdd(w.taken, 1), place = item / w.C;
    s.chunk = item % w.C;
    s.entry = 0;
    while (place < b.R * (b.G + 1) && (s.entry = atomicAdd(&w.queue[place], 0)) == 0) {  // adding 0 reads past any cache
        if (atomicAdd(w.done, 0) == b.R) break;  // nothing will be appended any more
        __nanosleep(50);
    }
    __threadfence();  // pairs with append's
}

__global__ void __launch_bounds__(BLOCK) prepare3(Batch b, Work w) {  // one block: an empty queue, then every request's first row
    for (int i = threadIdx.x; i < b.R * (b.G + 1); i += BLOCK) w.queue[i] = 0;
    if (threadIdx.x == 0) *w.taken = *w.appended = *w.done = 0;
    __syncthreads();
    for (int r = threadIdx.x; r < b.R; r += BLOCK) {
        w.first[r] = first_row(b, r);
        const int error = refuse(b, r, w.first[r]);
        finish(b, r, 0, -1, error);  // no token yet, so not FINE yet; and n_accepted = 0: from here on it is also the current row's k
        if (error) atomicAdd(w.done, 1); else append(w, r, false);
    }
}

template <typename T>
__global__ void __launch_bounds__(BLOCK, 4) verify3(Batch b, Work w) {  // 4 blocks on a multiprocessor: at most 64 registers
    SHARED(Shared, s);
    const int i = threadIdx.x;
    for (;;) {
        if (i == 0) take(b, w, s);
        __syncthreads();
        if (s.entry == 0) return;
        const int r = (s.entry - 1) / 2, c = s.chunk;
        const bool residual = (s.entry - 1) % 2;
        const int k = (int)b.n_accepted[r], len = (int)b.verify_len[r];  // k: counted up at each acceptance
        const int from = min(b.V, c * w.width), to = min(b.V, from + w.width);
        Row<T> row = row_of<T>(b, r, w.first[r], k);
        const float scale = row.scale;

        // this block's chunk
        if (!residual) {
            const Online mine = scan(row.logits + from, to - from, scale);
            const float top = block_max(mine.top, s);
            const double sum = block_sum(mine.sum * shrink(mine.top, top, scale), s);
            if (i == 0) w.top[r * w.C + c] = top, w.sum[r * w.C + c] = sum;
        } else {
            row.top = w.row_top[r], row.unit = w.unit[r], row.p_draft = draft_row(b, r, k);
            double mass = 0;  // 8 ids side by side per thread: one search in draft_ids serves all of them
            for (int v = from + 8 * i; v < to; v += 8 * BLOCK) mass += row.mass(v, min(to, v + 8));
            mass = block_sum(mass, s);
            if (i == 0) w.residual[r * w.C + c] = mass;
        }
        if (i == 0) {
            __threadfence();  // first the result, then the word that it is there
            s.arrived_last = atomicAdd(&w.arrived[r], 1) == w.C - 1;
            if (s.arrived_last) __threadfence();  // first the word of all others, then their results
        }
        __syncthreads();
        if (!s.arrived_last) continue;  // all others are counted in: their results are read only from here on

        // the last block in: all chunks of the row, one per thread, in order of c, not of arrival: every run gives the same bits
        const float top = i < w.C ? w.top[r * w.C + i] : -INFINITY;
        row.top = block_max(top, s);
        double mass = i < w.C ? w.sum[r * w.C + i] * shrink(top, row.top, scale) : 0;
        double total = block_sum(mass, s);
        if (!residual) {
            if (!is_normaliser(total)) {
                if (i == 0) finish(b, r, k, -1, BAD_LOGITS), atomicAdd(w.done, 1);
                continue;
            }
            if (b.temperature[r] == 0) {  // the argmax is in the first chunk that has the maximum: look there again
                const int chunk = block_min(i < w.C && top == row.top ? i : w.C, s);
                int mine = b.V;
                for (int v = min(b.V, (chunk + 1) * w.width) - 1 - i; v >= chunk * w.width; v -= BLOCK)
                    if (to_float(row.logits[v]) == row.top) mine = v;
                row.best = block_min(mine, s);
            }
            if (k < len) {
                row.unit = (float)(1 / total);
                const Verdict verdict = judge(b, r, k, row);
                if (verdict == BROKEN) {
                    if (i == 0) finish(b, r, k, -1, BAD_DRAFT), atomicAdd(w.done, 1);
                    continue;
                }
                if (verdict == ACCEPTED) {
                    if (i == 0) b.n_accepted[r] = k + 1, append(w, r, false);
                    continue;
                }
                // Rejected. The residual of a one-hot row is that one token's, so greedy has its correction already.
                if (row.best < 0) {
                    if (i == 0) w.row_top[r] = row.top, w.unit[r] = row.unit, append(w, r, true);
                    continue;
                }
            }
        } else {
            const double left = i < w.C ? w.residual[r * w.C + i] : 0, all_left = block_sum(left, s);
            if (!(all_left < INFINITY)) {
                if (i == 0) finish(b, r, k, -1, BAD_DRAFT), atomicAdd(w.done, 1);
                continue;
            }
            if (all_left > 0) mass = left, total = all_left;
            else row.p_draft = nullptr, row.unit = 1;  // rounding left nothing: a plain draw; the chunks' sums are at hand, not normalised: unit 1
        }
        int id = row.best;
        if (id < 0) {  // pick a chunk, then an id in it; only that chunk is read once more
            const double point = b.u[(size_t)r * (b.G + 1) + b.G] * total;
            const int chunk = pick(mass, point, s);
            if (chunk >= 0) id = draw(row, chunk * w.width, min(b.V, (chunk + 1) * w.width), point - s.base, s);
        }
        if (i == 0) finish(b, r, k, id, FINE), atomicAdd(w.done, 1);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// From the host. Nothing here waits for the GPU, allocates, or depends on values in its memory: a CUDA graph can hold it.

inline int chunks_per_row(int R, int V, int multiprocessors) {
    // Enough items for every block that runs at once, twice over, but none smaller than one 16-byte load of bf16 per thread.
    const int wanted = (8 * multiprocessors + R - 1) / (R > 0 ? R : 1), most = V / (8 * BLOCK);
    const int C = wanted < most ? wanted : most;
    return C < 1 ? 1 : C > BLOCK ? BLOCK : C;
}

inline size_t lay_out(Work& w, char* base, const Batch& b, int C) {  // -> bytes of scratch; with base, the pointers too
    const size_t R = b.R, chunks = R * C, entries = R * (b.G + 1);
    w.C = C;
    w.width = (b.V + C - 1) / C;
    w.sum = (double*)base, w.residual = w.sum + chunks;
    w.top = (float*)(w.residual + chunks), w.row_top = w.top + chunks, w.unit = w.row_top + R;
    w.first = (int*)(w.unit + R), w.arrived = w.first + R, w.queue = w.arrived + R;
    w.taken = w.queue + entries, w.appended = w.taken + 1, w.done = w.taken + 2;
    return (char*)(w.taken + 3) - base;
}

template <typename T>
void launch(int version, const Batch& b, int C, char* scratch, int multiprocessors, cudaStream_t stream) {
    if (b.R == 0) return;
    if (version == 1) LAUNCH(verify1<T>, (b.R + 31) / 32, 32, stream)(b);
    if (version == 2) LAUNCH(verify2<T>, b.R, BLOCK, stream)(b);
    if (version == 3) {
        Work w;
        lay_out(w, scratch, b, C);
        const int items = b.R * C, room = 4 * multiprocessors;  // room: blocks that run at once, see verify3's launch bounds
        // Same stream: verify3 begins when prepare3 has ended, and sees what it wrote.
        LAUNCH(prepare3, 1, BLOCK, stream)(b, w);
        LAUNCH(verify3<T>, items < room ? items : room, BLOCK, stream)(b, w);
    }
}

void verify(int version, bool is_bf16, const Batch& b, int C, char* scratch, int multiprocessors, cudaStream_t stream) {
    if (is_bf16) launch<bf16>(version, b, C, scratch, multiprocessors, stream);
    else launch<float>(version, b, C, scratch, multiprocessors, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// The binding. Only torch's builder, which defines this name, reads it: its headers take nvcc longer than all of the above.

#ifdef TORCH_EXTENSION_NAME
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

// -> {n_accepted (R,), next_token (R,), error (R,) int32}. Shapes and dtypes are checked here, values on the GPU (refuse).
std::vector<torch::Tensor> verify_tensors(const torch::Tensor& logits, const torch::Tensor& temperature, const torch::Tensor& p_draft,
                                          const torch::Tensor& tokens, const torch::Tensor& verify_len, const torch::Tensor& u,
                                          const std::optional<torch::Tensor>& draft_ids, int64_t version, int64_t chunks) {
    const c10::cuda::CUDAGuard guard(logits.device());  // launch where the tensors are, whatever the current device is
    TORCH_CHECK(logits.dim() == 2 && tokens.dim() == 2, "logits must be (N, V) and tokens (R, G)");
    const int64_t N = logits.size(0), V = logits.size(1), R = tokens.size(0), G = tokens.size(1);
    const int64_t K = draft_ids ? draft_ids->size(0) : V;
    TORCH_CHECK(V > 0 && V < 1 << 30 && N < 1 << 30 && R * (G + 1) < 1 << 22, "too large for 32-bit counters");
    TORCH_CHECK(version >= 1 && version <= 3, "version must be 1, 2 or 3");
    auto check = [&](const char* name, const torch::Tensor& t, torch::ScalarType type, c10::IntArrayRef shape) {
        TORCH_CHECK(t.device() == logits.device() && t.is_cuda() && t.is_contiguous(), name, " must be contiguous, on the logits' GPU");
        TORCH_CHECK(t.scalar_type() == type && t.sizes() == shape, name, " must be ", type, " ", shape, ", is ", t.scalar_type(), " ", t.sizes());
    };
    const bool is_bf16 = logits.scalar_type() == torch::kBFloat16;
    check("logits", logits, is_bf16 ? torch::kBFloat16 : torch::kFloat32, {N, V});
    check("temperature", temperature, torch::kFloat32, {R});
    check("p_draft", p_draft, torch::kFloat32, {R, G, K});
    check("tokens", tokens, torch::kInt64, {R, G});
    check("verify_len", verify_len, torch::kInt64, {R});
    check("u", u, torch::kFloat64, {R, G + 1});
    if (draft_ids) check("draft_ids", *draft_ids, torch::kInt64, {K});

    auto n_accepted = torch::empty({R}, tokens.options()), next_token = torch::empty({R}, tokens.options());
    auto error = torch::empty({R}, tokens.options().dtype(torch::kInt32));
    const Batch b{(int)R, (int)G, (int)V, (int)K, (int)N, logits.data_ptr(), temperature.data_ptr<float>(), p_draft.data_ptr<float>(),
                  draft_ids ? draft_ids->data_ptr<int64_t>() : nullptr, tokens.data_ptr<int64_t>(), verify_len.data_ptr<int64_t>(),
                  u.data_ptr<double>(), n_accepted.data_ptr<int64_t>(), next_token.data_ptr<int64_t>(), error.data_ptr<int>()};
    int multiprocessors = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, logits.get_device()));
    const int C = chunks > 0 ? (int)(chunks < BLOCK ? chunks : BLOCK) : chunks_per_row(b.R, b.V, multiprocessors);
    Work w;
    // From torch's allocator, which hands memory out in the order of the stream: it may be given back while the kernel runs.
    auto scratch = torch::empty({(int64_t)lay_out(w, nullptr, b, C)}, logits.options().dtype(torch::kUInt8));
    verify((int)version, is_bf16, b, C, (char*)scratch.data_ptr(), multiprocessors, c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return {n_accepted, next_token, error};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("verify", &verify_tensors, "logits to n_accepted, next_token, error", py::arg("logits"), py::arg("temperature"), py::arg("p_draft"),
          py::arg("tokens"), py::arg("verify_len"), py::arg("u"), py::arg("draft_ids") = py::none(), py::arg("version") = 3, py::arg("chunks") = 0);
}
#endif
