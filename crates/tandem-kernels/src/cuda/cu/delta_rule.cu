// The gated delta rule, a state `S` [dk, dv] for each text and value head.
//
// A walk is a list of runs of which each continues the one before. Walks that continue a run of
// another walk come one launch later, with that run's last state from memory. What is said of `S`:
//
//   S' = e^g S   u = v − S'ᵀk   S = S' + k (β u)ᵀ   o = scale · Sᵀq
//
// and of its gradient `dS`, where `do = scale · d_out`, from a run's last token to its first:
//
//   dS += q doᵀ   d = dSᵀk   dm = −β d   dS' = dS + k dmᵀ   dS before = e^g dS'
//
// so that `dS` does not depend on `S`. Four kernels make the gradients:
//
// * `states`: as forward, keeps u, and S before each chunk of 128 tokens;
// * `adjoints`: keeps d, and dS after each chunk; dv = β d;
// * `rows`, chunk by chunk: dq = S do and dk = S' dm + dS (β u), from u and d without products;
// * `gates`: dβ = d · u, and dg = Σ S' ⊙ dS' by dg = Σ S ⊙ (dS after it) + q · S do + k · (S' dm − dS (β u)),
//   whose first sum is the next token's dg, and at a chunk's end made of the states kept there.
//
// Threads: `forward`, `states` and `adjoints` have a block of 128 threads per (walk, value head, 32
// columns of dv): no column depends on another. Four lanes share a column, each with a quarter of its
// rows in registers. `rows` has a block per (chunk, key head, 32 rows of dk), where four lanes share
// a row; `gates` one per (chunk, value head).
// Bytes: a walk's tokens once for 32 columns; a state is read and written once where it is kept.
#include "sigmoid.cuh"
#include "vectors.cuh"

namespace {

constexpr int THREADS = 128, SIDE = 32, PARTS = 4, CHUNK = 128;
// Where a run begins.
enum { NOTHING, SLOT, END, CONTINUES };
constexpr uint32_t NONE = 0xffffffffu;

// A run: its rows, beginning, and number of a slot or of another run's end; where its own end and
// its state are kept; its first chunk; where its gradient goes; and which gradients it begins with.
struct Piece {
    uint32_t start, end, from, number, save, keep, first_chunk, head, first_child, children;
};
__device__ __forceinline__ Piece piece_at(const uint32_t *pieces, uint32_t i) {
    pieces += 10 * size_t(i);
    return {pieces[0], pieces[1], pieces[2], pieces[3], pieces[4], pieces[5], pieces[6], pieces[7], pieces[8], pieces[9]};
}

// The line of a matrix that four lanes share: element i of a lane is number `at(i)`, four side by
// side. A block has 32 lines.
template <int R> struct Line {
    static constexpr int ROOM = PARTS * R;
    int line = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    __device__ __forceinline__ int at(int i) const { return i / 4 * (4 * PARTS) + part * 4 + i % 4; }
    // The same in every lane of the line.
    __device__ __forceinline__ float sum(float x) const {
        x += __shfl_xor_sync(ALL, x, 1);
        return x + __shfl_xor_sync(ALL, x, 2);
    }
};

// A column of a state, or, transposed, a row; zeros beyond both sizes.
template <int R>
__device__ __forceinline__ void load_line(const Line<R> &own, const float *state, size_t step, size_t next, int length, bool is_there,
                                          float (&s)[R]) {
#pragma unroll
    for (int i = 0; i < R; i++) s[i] = is_there && own.at(i) < length ? state[own.at(i) * step + own.line * next] : 0.0f;
}
template <int R>
__device__ __forceinline__ void store_line(const Line<R> &own, float *state, size_t step, size_t next, int length, bool is_there,
                                           const float (&s)[R]) {
#pragma unroll
    for (int i = 0; i < R; i++) {
        if (is_there && own.at(i) < length) state[own.at(i) * step + own.line * next] = s[i];
    }
}

// Copies `count` rows of `cols` columns to rows of ROOM in shared memory, times a factor of the row;
// zeros beyond.
template <int ROOM, typename T, typename Factor>
__device__ __forceinline__ void fetch_rows(const T *x, size_t stride, int count, int cols, float *to, Factor factor) {
    if (cols % 4 == 0 && stride % 4 == 0 && is_aligned<4>(x)) {
        for (int i = 4 * threadIdx.x; i < count * ROOM; i += 4 * THREADS) {
            const int row = i / ROOM, column = i % ROOM;
            float v[4] = {0, 0, 0, 0};
            if (column < cols) load_many(x + row * stride + column, v);
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] *= factor(row);
            store_many(to + i, v);
        }
    } else {
        for (int i = threadIdx.x; i < count * ROOM; i += THREADS) {
            const int row = i / ROOM, column = i % ROOM;
            to[i] = column < cols ? load(x + row * stride + column) * factor(row) : 0.0f;
        }
    }
}
__device__ __forceinline__ float once(int) { return 1.0f; }

// The gates of a value head.
template <typename T> struct Gates {
    const T *a, *b;
    size_t a_stride, b_stride;
    float rate, bias;

    __device__ __forceinline__ float step(size_t row) const { return load(a + row * a_stride) + bias; }
    // g.
    __device__ __forceinline__ float log_decay(size_t row) const {
        const float x = step(row);
        return rate * (x > 20.0f ? x : log1pf(expf(x)));
    }
    __device__ __forceinline__ float beta(size_t row) const { return sigmoid(load(b + row * b_stride)); }
    __device__ __forceinline__ void fetch(size_t first, int count, float *decays, float *betas) const {
        for (int t = threadIdx.x; t < count; t += THREADS) {
            decays[t] = expf(log_decay(first + t));
            betas[t] = beta(first + t);
        }
    }
};
template <typename T>
__device__ __forceinline__ Gates<T> gates_of(const T *a, size_t a_stride, const T *b, size_t b_stride, const float *decay_log,
                                             const float *decay_bias, int head) {
    return {a + head, b + head, a_stride, b_stride, -expf(decay_log[head]), decay_bias[head]};
}

// Tokens in shared memory at a time.
template <int R> constexpr int TILE = R > 32 ? 16 : 32;

// The outputs of all tokens of a walk or, if TRAIN, what they change of the state (u). Heads are
// counted from `first_head`, and so are those of `ends` and `starts`; `states` has all.
template <int R, bool TRAIN, typename T, typename O>
__device__ __forceinline__ void forward(const uint32_t *__restrict__ walks, const uint32_t *__restrict__ pieces,
                                        const float *__restrict__ q, size_t q_stride, const float *__restrict__ k, size_t k_stride,
                                        const T *__restrict__ v, size_t v_stride, const T *__restrict__ a, size_t a_stride,
                                        const T *__restrict__ b, size_t b_stride, const float *__restrict__ decay_log,
                                        const float *__restrict__ decay_bias, int first_head, int heads, int group, int dk, int dv,
                                        float scale, float *states, size_t slot, float *ends, float *starts, O *__restrict__ out,
                                        size_t out_stride) {
    constexpr int ROOM = Line<R>::ROOM;
    SHARED(float, keys, TILE<R> *ROOM);
    SHARED(float, queries, TRAIN ? 4 : TILE<R> *ROOM);
    SHARED(float, values, TILE<R> *SIDE);
    SHARED(float, results, TILE<R> *SIDE);
    SHARED(float, decays, TILE<R>);
    SHARED(float, betas, TILE<R>);

    const Line<R> own;
    const int blocks = (dv + SIDE - 1) / SIDE, local = blockIdx.y / blocks, head = first_head + local;
    const int first = blockIdx.y % blocks * SIDE, cols = min(SIDE, dv - first);
    const bool is_there = own.line < cols;
    const size_t len = size_t(dk) * dv;
    const Gates<T> gates = gates_of(a, a_stride, b, b_stride, decay_log, decay_bias, head);
    q += head / group * dk, k += head / group * dk;
    v += size_t(head) * dv + first, out += size_t(TRAIN ? local : head) * dv + first;
    states += head * len + first, ends += local * len + first, starts += local * len + first;

    float s[R];
    const uint32_t first_piece = walks[2 * blockIdx.x], count_pieces = walks[2 * blockIdx.x + 1];
    for (uint32_t i = first_piece; i < first_piece + count_pieces; i++) {
        const Piece piece = piece_at(pieces, i);
        if (piece.from == NOTHING) {
#pragma unroll
            for (int i = 0; i < R; i++) s[i] = 0;
        } else if (piece.from == SLOT) {
            load_line(own, states + piece.number * slot, dv, 1, dk, is_there, s);
        } else if (piece.from == END) {
            load_line(own, ends + piece.number * size_t(heads) * len, dv, 1, dk, is_there, s);
        }
        for (uint32_t row = piece.start; row < piece.end; row += TILE<R>) {
            const int count = min(TILE<R>, int(piece.end - row));
            if (TRAIN && (row - piece.start) % CHUNK == 0) {
                const size_t chunk = piece.first_chunk + (row - piece.start) / CHUNK;
                store_line(own, starts + chunk * heads * len, dv, 1, dk, is_there, s);
            }
            fetch_rows<ROOM>(k + row * k_stride, k_stride, count, dk, keys, once);
            if (!TRAIN) fetch_rows<ROOM>(q + row * q_stride, q_stride, count, dk, queries, once);
            fetch_rows<SIDE>(v + row * v_stride, v_stride, count, cols, values, once);
            gates.fetch(row, count, decays, betas);
            __syncthreads();
            for (int t = 0; t < count; t++) {
                float sum = 0, result = 0;
                const float decay = decays[t];
#pragma unroll
                for (int i = 0; i < R; i += 4) {
                    float x[4];
                    load_many(keys + t * ROOM + own.at(i), x);
#pragma unroll
                    for (int j = 0; j < 4; j++) s[i + j] *= decay, sum = fmaf(s[i + j], x[j], sum);
                }
                const float u = values[t * SIDE + own.line] - own.sum(sum), change = betas[t] * u;
#pragma unroll
                for (int i = 0; i < R; i += 4) {
                    float x[4], y[4];
                    load_many(keys + t * ROOM + own.at(i), x);
                    if (!TRAIN) load_many(queries + t * ROOM + own.at(i), y);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        s[i + j] = fmaf(x[j], change, s[i + j]);
                        if (!TRAIN) result = fmaf(s[i + j], y[j], result);
                    }
                }
                result = TRAIN ? u : own.sum(result) * scale;
                if (own.part == 0) results[t * SIDE + own.line] = result;
            }
            __syncthreads();
            for (int i = threadIdx.x; i < count * SIDE; i += THREADS) {
                if (i % SIDE < cols) store(out + (row + i / SIDE) * out_stride + i % SIDE, results[i]);
            }
        }
        if (piece.save != NONE) store_line(own, ends + piece.save * size_t(heads) * len, dv, 1, dk, is_there, s);
        if (piece.keep != NONE) store_line(own, states + piece.keep * slot, dv, 1, dk, is_there, s);
    }
}

// `d` of all tokens of a walk, from its end, and the gradients of `v`.
template <int R, typename T>
__device__ __forceinline__ void adjoints(const uint32_t *__restrict__ walks, const uint32_t *__restrict__ pieces,
                                         const float *__restrict__ q, size_t q_stride, const float *__restrict__ k, size_t k_stride,
                                         const T *__restrict__ d_out, size_t d_out_stride, const T *__restrict__ a, size_t a_stride,
                                         const T *__restrict__ b, size_t b_stride, const float *__restrict__ decay_log,
                                         const float *__restrict__ decay_bias, int first_head, int heads, int group, int dk, int dv,
                                         float scale, float *begins, float *stops, float *__restrict__ ds, T *__restrict__ d_values,
                                         size_t d_values_stride) {
    constexpr int ROOM = Line<R>::ROOM;
    SHARED(float, keys, TILE<R> *ROOM);
    SHARED(float, queries, TILE<R> *ROOM);
    SHARED(float, given, TILE<R> *SIDE);
    SHARED(float, results, TILE<R> *SIDE);
    SHARED(float, decays, TILE<R>);
    SHARED(float, betas, TILE<R>);

    const Line<R> own;
    const int blocks = (dv + SIDE - 1) / SIDE, local = blockIdx.y / blocks, head = first_head + local;
    const int first = blockIdx.y % blocks * SIDE, cols = min(SIDE, dv - first);
    const bool is_there = own.line < cols;
    const size_t len = size_t(dk) * dv, ds_stride = size_t(heads) * dv;
    const Gates<T> gates = gates_of(a, a_stride, b, b_stride, decay_log, decay_bias, head);
    q += head / group * dk, k += head / group * dk;
    d_out += size_t(head) * dv + first, d_values += size_t(head) * dv + first, ds += size_t(local) * dv + first;
    begins += local * len + first, stops += local * len + first;

    float s[R];
#pragma unroll
    for (int i = 0; i < R; i++) s[i] = 0;
    const uint32_t first_piece = walks[2 * blockIdx.x], count_pieces = walks[2 * blockIdx.x + 1];
    for (uint32_t i = first_piece + count_pieces; i-- > first_piece;) {
        const Piece piece = piece_at(pieces, i);
#pragma unroll 1
        for (uint32_t child = piece.children; child-- > 0;) {
            const float *const of_child = begins + size_t(piece.first_child + child) * heads * len;
            // A few at a time: all would not fit into registers beside the state.
#pragma unroll
            for (int i = 0; i < R; i++) {
                if (i % 16 == 0) __syncwarp();
                s[i] += is_there && own.at(i) < dk ? of_child[own.at(i) * size_t(dv) + own.line] : 0.0f;
            }
        }
        for (uint32_t tile = (piece.end - piece.start + TILE<R> - 1) / TILE<R>; tile-- > 0;) {
            const uint32_t row = piece.start + tile * TILE<R>;
            const int count = min(TILE<R>, int(piece.end - row));
            if (row + count == piece.end || (tile + 1) * TILE<R> % CHUNK == 0) {
                const size_t chunk = piece.first_chunk + tile * TILE<R> / CHUNK;
                store_line(own, stops + chunk * heads * len, dv, 1, dk, is_there, s);
            }
            fetch_rows<ROOM>(k + row * k_stride, k_stride, count, dk, keys, once);
            fetch_rows<ROOM>(q + row * q_stride, q_stride, count, dk, queries, once);
            fetch_rows<SIDE>(d_out + row * d_out_stride, d_out_stride, count, cols, given, [&](int) { return scale; });
            gates.fetch(row, count, decays, betas);
            __syncthreads();
            for (int t = count; t-- > 0;) {
                const float d_o = given[t * SIDE + own.line], decay = decays[t];
                float sum = 0;
#pragma unroll
                for (int i = 0; i < R; i += 4) {
                    float x[4], y[4];
                    load_many(keys + t * ROOM + own.at(i), x);
                    load_many(queries + t * ROOM + own.at(i), y);
#pragma unroll
                    for (int j = 0; j < 4; j++) s[i + j] = fmaf(y[j], d_o, s[i + j]), sum = fmaf(s[i + j], x[j], sum);
                }
                const float d = own.sum(sum), dm = -betas[t] * d;
#pragma unroll
                for (int i = 0; i < R; i += 4) {
                    float x[4];
                    load_many(keys + t * ROOM + own.at(i), x);
#pragma unroll
                    for (int j = 0; j < 4; j++) s[i + j] = decay * fmaf(x[j], dm, s[i + j]);
                }
                if (own.part == 0) results[t * SIDE + own.line] = d;
            }
            __syncthreads();
            for (int i = threadIdx.x; i < count * SIDE; i += THREADS) {
                const int t = i / SIDE, column = i % SIDE;
                if (column >= cols) continue;
                ds[(row + t) * ds_stride + column] = results[i];
                store(d_values + (row + t) * d_values_stride + column, betas[t] * results[i]);
            }
            // The next tile's gates would be overwritten.
            __syncthreads();
        }
        if (piece.from == END) store_line(own, begins + size_t(piece.head) * heads * len, dv, 1, dk, is_there, s);
    }
}

// Tokens in shared memory at a time, in `rows`.
template <int R> constexpr int ROW_TILE = R > 32 ? 8 : 16;

// `dq` and `dk` of a chunk, summed over the value heads of the key head in order, and what they give
// to `dg`. `chunks` are (first row, number of rows) each.
template <int R, typename T>
__device__ __forceinline__ void rows(const uint32_t *__restrict__ chunks, const float *__restrict__ q, size_t q_stride,
                                     const float *__restrict__ k, size_t k_stride, const T *__restrict__ d_out, size_t d_out_stride,
                                     const T *__restrict__ a, size_t a_stride, const T *__restrict__ b, size_t b_stride,
                                     const float *__restrict__ decay_log, const float *__restrict__ decay_bias, int first_head,
                                     int heads, int group, int dk, int dv, float scale, const float *__restrict__ starts,
                                     const float *__restrict__ stops, const float *__restrict__ us, const float *__restrict__ ds,
                                     float *terms, float *__restrict__ bounds, float *dq, size_t dq_stride, float *d_keys,
                                     size_t d_keys_stride) {
    constexpr int ROOM = Line<R>::ROOM, TOKENS = ROW_TILE<R>;
    SHARED(float, of_out, TOKENS *ROOM);
    SHARED(float, changes, TOKENS *ROOM);
    SHARED(float, of_means, TOKENS *ROOM);
    SHARED(float, keys, TOKENS *SIDE);
    SHARED(float, queries, TOKENS *SIDE);
    SHARED(float, of_queries, TOKENS *SIDE);
    SHARED(float, of_keys, TOKENS *SIDE);
    SHARED(float, decays, TOKENS);
    SHARED(float, betas, TOKENS);

    const Line<R> own;
    const int blocks = (dk + SIDE - 1) / SIDE, block = blockIdx.y % blocks, first = block * SIDE;
    const int num_rows = min(SIDE, dk - first), thread = threadIdx.x;
    const bool is_there = own.line < num_rows;
    const size_t len = size_t(dk) * dv, width = size_t(heads) * dv;
    const uint32_t start = chunks[2 * blockIdx.x], count = chunks[2 * blockIdx.x + 1];
    const int local_key = blockIdx.y / blocks, key = first_head / group + local_key;
    q += size_t(start) * q_stride + key * dk + first, k += size_t(start) * k_stride + key * dk + first;
    dq += size_t(start) * dq_stride + key * dk + first, d_keys += size_t(start) * d_keys_stride + key * dk + first;

    for (int local = local_key * group; local < (local_key + 1) * group; local++) {
        const int head = first_head + local;
        const bool is_first = local == local_key * group;
        const Gates<T> gates = gates_of(a, a_stride, b, b_stride, decay_log, decay_bias, head);
        const size_t state = (size_t(blockIdx.x) * heads + local) * len + size_t(first) * dv;
        float *const term = terms + (size_t(start) * heads + local) * blocks + block;
        // Waits for the last tile's readers.
        const auto fetch = [&](uint32_t tile, int tokens) {
            const size_t row = start + tile;
            __syncthreads();
            gates.fetch(row, tokens, decays, betas);
            fetch_rows<SIDE>(k + tile * k_stride, k_stride, tokens, num_rows, keys, once);
            fetch_rows<SIDE>(q + tile * q_stride, q_stride, tokens, num_rows, queries, once);
            __syncthreads();
            fetch_rows<ROOM>(d_out + row * d_out_stride + size_t(head) * dv, d_out_stride, tokens, dv, of_out,
                             [&](int) { return scale; });
            fetch_rows<ROOM>(us + row * width + size_t(local) * dv, width, tokens, dv, changes, [&](int t) { return betas[t]; });
            fetch_rows<ROOM>(ds + row * width + size_t(local) * dv, width, tokens, dv, of_means, [&](int t) { return -betas[t]; });
            __syncthreads();
        };
        float s[R];
        load_line(own, starts + state, 1, dv, dv, is_there, s);
        for (uint32_t tile = 0; tile < count; tile += TOKENS) {
            const int tokens = min(TOKENS, int(count - tile));
            fetch(tile, tokens);
            for (int t = 0; t < tokens; t++) {
                const float decay = decays[t], x = keys[t * SIDE + own.line];
                float of_query = 0, of_key = 0;
#pragma unroll
                for (int i = 0; i < R; i += 4) {
                    const int at = t * ROOM + own.at(i);
                    float change[4], d_o[4], dm[4];
                    load_many(changes + at, change), load_many(of_out + at, d_o), load_many(of_means + at, dm);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        s[i + j] *= decay;
                        of_key = fmaf(s[i + j], dm[j], of_key);
                        s[i + j] = fmaf(x, change[j], s[i + j]);
                        of_query = fmaf(s[i + j], d_o[j], of_query);
                    }
                }
                of_query = own.sum(of_query), of_key = own.sum(of_key);
                if (own.part == 0) of_queries[t * SIDE + own.line] = of_query, of_keys[t * SIDE + own.line] = of_key;
            }
            __syncthreads();
            for (int i = thread; i < tokens * SIDE; i += THREADS) {
                const int column = i % SIDE;
                if (column >= num_rows) continue;
                float *const to_q = dq + (tile + i / SIDE) * dq_stride + column;
                float *const to_k = d_keys + (tile + i / SIDE) * d_keys_stride + column;
                *to_q = is_first ? of_queries[i] : *to_q + of_queries[i];
                *to_k = is_first ? of_keys[i] : *to_k + of_keys[i];
            }
            if (thread < tokens) {
                float sum = 0;
                for (int i = 0; i < SIDE; i++) {
                    const int at = thread * SIDE + (i + thread) % SIDE;
                    sum += queries[at] * of_queries[at] + keys[at] * of_keys[at];
                }
                term[(tile + thread) * size_t(heads) * blocks] = sum;
            }
        }
        // From here on the gradient of the state.
        float sum = 0, after[R];
        load_line(own, stops + state, 1, dv, dv, is_there, after);
#pragma unroll
        for (int i = 0; i < R; i++) sum = fmaf(s[i], after[i], sum), s[i] = after[i];
        sum = block_sum<THREADS>(sum);
        if (thread == 0) bounds[(size_t(blockIdx.x) * heads + local) * blocks + block] = sum;
        for (uint32_t tile = (count + TOKENS - 1) / TOKENS * TOKENS; tile > 0;) {
            tile -= TOKENS;
            const int tokens = min(TOKENS, int(count - tile));
            fetch(tile, tokens);
            for (int t = tokens; t-- > 0;) {
                const float decay = decays[t], x = keys[t * SIDE + own.line], y = queries[t * SIDE + own.line];
                float of_key = 0;
#pragma unroll
                for (int i = 0; i < R; i += 4) {
                    const int at = t * ROOM + own.at(i);
                    float change[4], d_o[4], dm[4];
                    load_many(changes + at, change), load_many(of_out + at, d_o), load_many(of_means + at, dm);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        s[i + j] = fmaf(y, d_o[j], s[i + j]);
                        of_key = fmaf(s[i + j], change[j], of_key);
                        s[i + j] = decay * fmaf(x, dm[j], s[i + j]);
                    }
                }
                of_key = own.sum(of_key);
                if (own.part == 0) of_keys[t * SIDE + own.line] = of_key;
            }
            __syncthreads();
            for (int i = thread; i < tokens * SIDE; i += THREADS) {
                if (i % SIDE < num_rows) d_keys[(tile + i / SIDE) * d_keys_stride + i % SIDE] += of_keys[i];
            }
            if (thread < tokens) {
                float sum = 0;
                for (int i = 0; i < SIDE; i++) {
                    const int at = thread * SIDE + (i + thread) % SIDE;
                    sum += keys[at] * of_keys[at];
                }
                term[(tile + thread) * size_t(heads) * blocks] -= sum;
            }
        }
    }
}

// The logarithm of a decay to 2^-24.
constexpr float NOTHING_LEFT = -16.7f;

// The gradients of the gates' inputs of a chunk. `blocks` is the number of blocks of rows.
template <typename T>
__device__ __forceinline__ void gates_backward(const uint32_t *__restrict__ chunks, const T *__restrict__ a, size_t a_stride,
                                               const T *__restrict__ b, size_t b_stride, const float *__restrict__ decay_log,
                                               const float *__restrict__ decay_bias, int first_head, int heads, int blocks, int dv,
                                               const float *__restrict__ us, const float *__restrict__ ds,
                                               const float *__restrict__ terms, const float *__restrict__ bounds,
                                               T *__restrict__ da, size_t da_stride, T *__restrict__ db, size_t db_stride,
                                               float *__restrict__ d_decay_log, size_t d_decay_log_stride) {
    SHARED(float, of_betas, CHUNK);
    SHARED(float, of_decays, CHUNK);
    SHARED(float, logs, CHUNK);
    const int local = blockIdx.y, head = first_head + local, thread = threadIdx.x;
    const uint32_t start = chunks[2 * blockIdx.x], count = chunks[2 * blockIdx.x + 1];
    const Gates<T> gates = gates_of(a, a_stride, b, b_stride, decay_log, decay_bias, head);
    for (uint32_t t = thread / WARP; t < count; t += THREADS / WARP) {
        const size_t at = (size_t(start + t) * heads + local) * dv;
        float sum = 0;
        for (int i = thread % WARP; i < dv; i += WARP) sum = fmaf(us[at + i], ds[at + i], sum);
        sum = warp_sum(sum);
        if (thread % WARP == 0) of_betas[t] = sum;
    }
    if (thread < int(count)) {
        const float *const term = terms + (size_t(start + thread) * heads + local) * blocks;
        float sum = 0;
        for (int i = 0; i < blocks; i++) sum += term[i];
        of_decays[thread] = sum, logs[thread] = gates.log_decay(start + thread);
    }
    __syncthreads();
    if (thread == 0) {
        const float *const bound = bounds + (size_t(blockIdx.x) * heads + local) * blocks;
        float sum = 0;
        for (int i = 0; i < blocks; i++) sum += bound[i];
        for (uint32_t t = count; t-- > 0;) {
            // Where the decay leaves less than rounding, dg has only the errors of its terms.
            sum = logs[t] < NOTHING_LEFT ? 0.0f : sum + of_decays[t];
            of_decays[t] = sum;
        }
    }
    __syncthreads();
    if (thread < int(count)) {
        const size_t row = start + thread;
        const float beta = gates.beta(row), of_decay = of_decays[thread];
        store(da + row * da_stride + head, of_decay * gates.rate * sigmoid(gates.step(row)));
        store(db + row * db_stride + head, of_betas[thread] * (beta * (1.0f - beta)));
        d_decay_log[row * d_decay_log_stride + head] = of_decay * logs[thread];
    }
}

} // namespace

#define DELTA_RULE(name, R, TRAIN, T, O)                                                                                   \
    KERNEL_BOUNDS(name, THREADS, 2, const uint32_t *walks, const uint32_t *pieces, const float *q, long long q_stride,     \
                  const float *k, long long k_stride, const T *v, long long v_stride, const T *a, long long a_stride,      \
                  const T *b, long long b_stride, const float *decay_log, const float *decay_bias, int first_head,         \
                  int heads, int group, int dk, int dv, float scale, float *states, long long slot, float *ends,           \
                  float *starts, O *out, long long out_stride) {                                                           \
        forward<R, TRAIN>(walks, pieces, q, q_stride, k, k_stride, v, v_stride, a, a_stride, b, b_stride, decay_log,       \
                          decay_bias, first_head, heads, group, dk, dv, scale, states, slot, ends, starts, out,            \
                          out_stride);                                                                                     \
    }
#define ADJOINTS(name, R, T)                                                                                               \
    KERNEL_BOUNDS(name, THREADS, 2, const uint32_t *walks, const uint32_t *pieces, const float *q, long long q_stride,     \
                  const float *k, long long k_stride, const T *d_out, long long d_out_stride, const T *a,                  \
                  long long a_stride, const T *b, long long b_stride, const float *decay_log, const float *decay_bias,     \
                  int first_head, int heads, int group, int dk, int dv, float scale, float *begins, float *stops,          \
                  float *ds, T *d_values, long long d_values_stride) {                                                     \
        adjoints<R>(walks, pieces, q, q_stride, k, k_stride, d_out, d_out_stride, a, a_stride, b, b_stride, decay_log,     \
                    decay_bias, first_head, heads, group, dk, dv, scale, begins, stops, ds, d_values, d_values_stride);    \
    }
#define ROWS(name, R, T)                                                                                                   \
    KERNEL_BOUNDS(name, THREADS, 2, const uint32_t *chunks, const float *q, long long q_stride, const float *k,            \
                  long long k_stride, const T *d_out, long long d_out_stride, const T *a, long long a_stride, const T *b,  \
                  long long b_stride, const float *decay_log, const float *decay_bias, int first_head, int heads,          \
                  int group, int dk, int dv, float scale, const float *starts, const float *stops, const float *us,        \
                  const float *ds, float *terms, float *bounds, float *dq, long long dq_stride, float *d_keys,             \
                  long long d_keys_stride) {                                                                               \
        rows<R>(chunks, q, q_stride, k, k_stride, d_out, d_out_stride, a, a_stride, b, b_stride, decay_log, decay_bias,    \
                first_head, heads, group, dk, dv, scale, starts, stops, us, ds, terms, bounds, dq, dq_stride, d_keys,      \
                d_keys_stride);                                                                                            \
    }
#define GATES(name, T)                                                                                                     \
    KERNEL_BOUNDS(name, THREADS, 4, const uint32_t *chunks, const T *a, long long a_stride, const T *b,                    \
                  long long b_stride, const float *decay_log, const float *decay_bias, int first_head, int heads,          \
                  int blocks, int dv, const float *us, const float *ds, const float *terms, const float *bounds, T *da,    \
                  long long da_stride, T *db, long long db_stride, float *d_decay_log, long long d_decay_log_stride) {     \
        gates_backward(chunks, a, a_stride, b, b_stride, decay_log, decay_bias, first_head, heads, blocks, dv, us, ds,     \
                       terms, bounds, da, da_stride, db, db_stride, d_decay_log, d_decay_log_stride);                      \
    }
#define BY_SIZE(type, R, T)                                                                                                \
    DELTA_RULE(delta_rule_##R##_##type, R, false, T, T)                                                                    \
    DELTA_RULE(delta_states_##R##_##type, R, true, T, float)                                                               \
    ADJOINTS(delta_adjoints_##R##_##type, R, T)                                                                            \
    ROWS(delta_rows_##R##_##type, R, T)
#define ALL_KERNELS(type, T)                                                                                               \
    BY_SIZE(type, 16, T)                                                                                                   \
    BY_SIZE(type, 32, T)                                                                                                   \
    BY_SIZE(type, 64, T)                                                                                                   \
    GATES(delta_gates_##type, T)
ALL_KERNELS(f32, float)
ALL_KERNELS(bf16, bf16)
