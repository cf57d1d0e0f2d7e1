// The gradient of a team of sequences of the recurrent delta rule, from the last step to the first, in the names of
// recurrent_delta.hpp.
#pragma once

#include "recurrent_delta.hpp"

namespace fastweights {

template <class T, int Bytes>
struct RecurrentDeltaBackwardTeam : RecurrentDeltaTeam<T, Bytes> {
    using Base = RecurrentDeltaTeam<T, Bytes>;
    using typename Base::C, typename Base::V, typename Base::Step;
    using Base::p, Base::in, Base::from, Base::count, Base::heads, Base::part, Base::wide, Base::size, Base::gates, Base::row;
    using Base::numbers, Base::matrices, Base::width, Base::mixed, Base::take, Base::length, Base::anew, Base::taps;

    T* rows;                                    // the weight, [row,H]
    T *steps, *written;                         // of a chunk, [team,chunk,...], and what each step wrote, [team,N,chunk,W]
    T* shares;                                  // [team,N,chunk+1]: the gradient of the memory by what each step of the chunk
                                                // wrote, and at last by the memory before it
    T* bounds;                                  // the largest that shares have been since they were fresh, faded as they are
    T* scores;                                  // [chunk,4]: products of what was written and what is read
    T* turned;                                  // [chunk,W]
    T *grad_hidden, *before, *grad_memory;      // [team,H], the next of it, [team,N,W,padded W]
    T *grad_sum, *grad_q, *grad_k, *grad_v;     // [H]: of z and of M^T q; of q, k and v, one behind the other
    T *by_written, *by_read, *by_missing;       // [H]: products of the rows of a matrix
    T *grad_gain, *grad_bias;                   // [team,H]
    T *driven, *raw;                            // [row]: a step's gradient before the convolution, and its drive
    T *grad_taps, *grad_shift;                  // [team,C,row], [team,row]

    static std::int64_t more_numbers(const RecurrentDeltaProblem& p, std::int64_t count) {
        const std::int64_t part = p.size / p.heads, wide = C::padded(part), size = p.heads * wide;
        const std::int64_t gates = C::padded(2 * p.heads), row = 4 * size + gates, matrices = p.heads * part * wide;
        const std::int64_t of_chunk = recurrent_delta_chunk * (7 * size + 2 * gates);
        const std::int64_t of_convolution = row * (2 + count * (p.taken + 1));
        const std::int64_t scores = recurrent_delta_chunk * (4 + wide) + 2 * count * p.heads * (recurrent_delta_chunk + 1);
        return size * row + count * (of_chunk + 4 * size + matrices) + 7 * size + scores + (p.taken ? of_convolution : 0);
    }

    RecurrentDeltaBackwardTeam(const RecurrentDeltaProblem& problem, const RecurrentDeltaInputs<T>& inputs, std::int64_t begin,
                               std::int64_t end)
        : Base(problem, inputs, begin, end, more_numbers(problem, end - begin)) {
        rows = take(std::int64_t(row) * size);
        steps = take(count * recurrent_delta_chunk * this->step_numbers());
        written = take(count * recurrent_delta_chunk * size);
        shares = take(count * heads * (recurrent_delta_chunk + 1));
        bounds = take(count * heads * (recurrent_delta_chunk + 1));
        scores = take(4 * recurrent_delta_chunk);
        turned = take(recurrent_delta_chunk * wide);
        grad_hidden = take(count * size);
        before = take(count * size);
        grad_memory = take(count * matrices);
        for (T** vector : {&grad_sum, &by_written, &by_read, &by_missing}) *vector = take(size);
        grad_q = take(3 * size);
        grad_k = grad_q + size;
        grad_v = grad_k + size;
        grad_gain = take(count * size);
        grad_bias = take(count * size);
        if (!p.taken) return;
        driven = take(row);
        raw = take(row);
        grad_taps = take(count * p.taken * row);
        grad_shift = take(count * row);
        // From here on it holds the gradients of the steps that follow.
        std::fill_n(this->recent, count * (p.taken - 1) * row, T(0));
    }

    FASTWEIGHTS_INLINE void backward(const RecurrentDeltaResults<T>& kept, const T* grad_outputs, const T* of_memory,
                                     const RecurrentDeltaGradients<T>& to) {
        const std::int64_t whole = std::int64_t(heads) * part * part;
        for (std::int64_t i = 0; i < numbers; ++i)
            this->spread(in.weight + i * p.size, rows + std::int64_t(this->row_place(i)) * size);
        for (std::int64_t s = 0; of_memory && s < count; ++s)
            this->load_memory(of_memory + (from + s) * whole, grad_memory + s * matrices);
        for (std::int64_t first = (this->chunks - 1) * recurrent_delta_chunk; first >= 0; first -= recurrent_delta_chunk) {
            const std::int64_t end = std::min(first + recurrent_delta_chunk, p.steps);
            for (std::int64_t s = 0; s < count; ++s) run_again(kept, s, first, std::min(end, length(s)));
            for (std::int64_t t = end - 1; t >= first; --t) {
                for (std::int64_t s = 0; s < count; ++s) {
                    T* const outer = mixed + s * row;
                    const std::int64_t place = t * p.batch + from + s;
                    if (t > 0) prefetch(place - p.batch, kept.outputs, grad_outputs, to);
                    if (t < length(s)) {
                        differentiate(s, t, kept, kept.outputs + place * p.size, grad_outputs + place * p.size, outer);
                    } else {
                        std::fill_n(outer, row, T(0));
                    }
                    const std::int64_t at = place * numbers;
                    if (p.taken) {
                        this->gather_row(outer, to.products + at);
                        convolve_back(s, t, outer);
                    }
                    this->gather_row(p.taken ? driven : outer, to.drive + at);
                }
                this->multiply(count, size, row, mixed, row, rows, size, before, size, false);
                for (std::int64_t s = 0; s < count; ++s) {
                    if (t >= length(s)) continue;
                    std::copy_n(before + s * size, size, grad_hidden + s * size);
                    if (!anew(t, s)) continue;
                    std::fill_n(grad_hidden + s * size, size, T(0));
                    std::fill_n(grad_memory + s * matrices, matrices, T(0));
                    for (T* const some : {shares, bounds})
                        std::fill_n(some + s * heads * (recurrent_delta_chunk + 1), heads * (recurrent_delta_chunk + 1), T(0));
                    if (p.taken) std::fill_n(this->recent_of(s, 0), (p.taken - 1) * row, T(0));
                }
            }
        }
        for (std::int64_t s = 0; p.taken && s < count; ++s) finish_convolution(s, to);
        for (std::int64_t s = 0; s < count; ++s) {
            this->gather(grad_hidden + s * size, to.hidden + (from + s) * p.size);
            this->gather(grad_gain + s * size, to.gain + (from + s) * p.size);
            this->gather(grad_bias + s * size, to.bias + (from + s) * p.size);
            this->store_memory(grad_memory + s * matrices, to.memory + (from + s) * whole);
        }
    }

  private:
    // What the step of a sequence at a place reads and writes of tensors whose rows follow the steps.
    FASTWEIGHTS_INLINE void prefetch(std::int64_t place, const T* outputs, const T* grad_outputs,
                                     const RecurrentDeltaGradients<T>& to) const {
        const int units = static_cast<int>(p.size), rows_of = static_cast<int>(numbers);
        C::prefetch(outputs + place * units, units);
        C::prefetch(grad_outputs + place * units, units);
        C::prefetch(to.drive + place * numbers, rows_of);
        if (!p.taken) return;
        C::prefetch(in.drive + place * numbers, rows_of);
        C::prefetch(to.products + place * numbers, rows_of);
    }

    FASTWEIGHTS_INLINE Step step_of(std::int64_t s, std::int64_t i) const {
        return this->step_at(steps + (s * recurrent_delta_chunk + i) * this->step_numbers());
    }
    FASTWEIGHTS_INLINE T* written_of(std::int64_t s, int n, std::int64_t i) const {
        return written + ((s * heads + n) * recurrent_delta_chunk + i) * wide;
    }

    // The gradient of the drive of a step, by its own products and those of the steps that read it later.
    FASTWEIGHTS_OUTLINE void convolve_back(std::int64_t s, std::int64_t t, const T* own) const {
        const std::int64_t before = p.taken - 1;
        std::fill_n(driven, row, T(0));
        if (t >= length(s)) return;
        this->spread_row(in.drive + (t * p.batch + from + s) * numbers, raw);
        T* const of_shift = grad_shift + s * row;
        C::fill(row, of_shift, [&](int j) FASTWEIGHTS_INLINE_LAMBDA { return C::load(of_shift + j) + C::load(own + j); });
        add_tap(s, before, own);
        // Not past a start or the end: a gradient of zero times a number that is not finite is not zero.
        for (std::int64_t i = 1; i <= before && t + i < length(s) && !anew(t + i, s); ++i)
            add_tap(s, before - i, this->recent_of(s, (t + i) % before));
        if (before) std::copy_n(own, row, this->recent_of(s, t % before));
    }
    // What one tap adds to the gradients of a drive, `raw`, and of the tap.
    FASTWEIGHTS_OUTLINE void add_tap(std::int64_t s, std::int64_t i, const T* later) const {
        T* const of_tap = grad_taps + (s * p.taken + i) * row;
        const T* const tap = taps + i * row;
        C::fill(row, of_tap, [&](int j) FASTWEIGHTS_INLINE_LAMBDA {
            const V gradient = C::load(later + j);
            C::store(C::load(driven + j) + gradient * C::load(tap + j), driven + j);
            return C::load(of_tap + j) + gradient * C::load(raw + j);
        });
    }
    // The gradients of what was driven before the first step, which the first ones read, and of the taps and the shift.
    FASTWEIGHTS_OUTLINE void finish_convolution(std::int64_t s, const RecurrentDeltaGradients<T>& to) const {
        const std::int64_t before = p.taken - 1, sequence = from + s;
        for (std::int64_t place = 0; in.last && place < before; ++place) {
            std::fill_n(driven, row, T(0));
            this->spread_row(this->last_of(s, place), raw);
            // As above.
            for (std::int64_t t = 0; t <= place && t < length(s) && !anew(t, s); ++t)
                add_tap(s, place - t, this->recent_of(s, t));
            this->gather_row(driven, to.last + (sequence * before + place) * numbers);
        }
        for (std::int64_t i = 0; i < p.taken; ++i)
            this->gather_row(grad_taps + (s * p.taken + i) * row, to.taps + (sequence * p.taken + i) * numbers);
        this->gather_row(grad_shift + s * row, to.shift + sequence * numbers);
    }

    // The steps of a chunk, and what they wrote by the gradient of the memory after the last.
    FASTWEIGHTS_OUTLINE void run_again(const RecurrentDeltaResults<T>& kept, std::int64_t s, std::int64_t first,
                                       std::int64_t end) {
        for (std::int64_t t = first; t < end; ++t) {
            const T* const inside = this->inside_at(kept.inside, s, t);
            const Step now = step_of(s, t - first);
            this->activate(inside + size, now);
            for (int n = 0; n < heads; ++n) {
                const T* const missing = this->missing_of(inside) + n * wide;
                C::fill(wide, written_of(s, n, t - first), [&](int j) FASTWEIGHTS_INLINE_LAMBDA {
                    return C::load(missing + j) * now.gates[heads + n];
                });
            }
        }
        for (int n = 0; end > first && n < heads; ++n) share(s, n, end - first, this->kept_at(kept.kept, s, first));
    }

    FASTWEIGHTS_INLINE T* shares_of(T* all, std::int64_t s, int n) const {
        return all + (s * heads + n) * (recurrent_delta_chunk + 1);
    }
    // The shares of the first steps of a chunk and of the memory before it, as they are now.
    FASTWEIGHTS_OUTLINE void share(std::int64_t s, int n, std::int64_t some, const T* memory) const {
        const std::int64_t head = std::int64_t(n) * part * wide;
        const T* const grad_m = grad_memory + s * matrices + head;
        T *const share = shares_of(shares, s, n), *const bound = shares_of(bounds, s, n);
        this->multiply(some, wide, part, step_of(s, 0).k + n * wide, this->step_numbers(), grad_m, wide, turned, wide, false);
        for (std::int64_t i = 0; i < some; ++i) share[i] = dot(turned + i * wide, written_of(s, n, i), wide);
        T base = 0;
        for (int i = 0; memory && i < part; ++i) base += dot(memory + head + i * wide, grad_m + i * wide, wide);
        share[recurrent_delta_chunk] = base;
        for (std::int64_t i = 0; i <= recurrent_delta_chunk; ++i) bound[i] = std::abs(share[i]);
    }

    FASTWEIGHTS_INLINE T dot(const T* x, const T* y, int numbers) const {
        return C::sum_of(numbers, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return C::load(x + i) * C::load(y + i); })[0];
    }

    // Of the products of one step, by its output and by what follows.
    FASTWEIGHTS_OUTLINE void differentiate(std::int64_t s, std::int64_t t, const RecurrentDeltaResults<T>& kept,
                                           const T* outputs, const T* grad_outputs, T* outer) {
        const std::int64_t i = t % recurrent_delta_chunk;
        const T* const inside = this->inside_at(kept.inside, s, t);
        const Step now = step_of(s, i);
        T *const by_output = by_written, *const h = by_read;  // neither is in use yet
        this->spread(grad_outputs, by_output);
        this->spread(outputs, h);
        const T* const missing = this->missing_of(inside);
        differentiate_norm(s, inside, missing[size], h, by_output);
        std::copy_n(grad_sum, size, outer);
        std::fill_n(outer + 4 * size, gates, T(0));
        const T* memory = this->kept_at(kept.kept, s, t);
        std::int64_t oldest = i + 1;  // of the writes of this chunk that the step reads
        while (--oldest > 0 && !anew(t - i + oldest, s)) {}
        if (anew(t - i + oldest, s)) memory = nullptr;
        for (int n = 0; n < heads; ++n)
            differentiate_head(s, i, n, missing + n * wide, memory, oldest, outer + 4 * size);
        for (int part_of = 0; part_of < 2; ++part_of)
            for (int n = 0; n < heads; ++n) {
                const T* const unit = now.q + part_of * size + n * wide;
                T* const gradient = grad_q + part_of * size + n * wide;
                const T length = now.lengths[part_of * heads + n];
                const T along = length > T(shortest_key) ? dot(unit, gradient, part) : T(0);
                C::fill(wide, gradient, [&](int j) FASTWEIGHTS_INLINE_LAMBDA {
                    return (C::load(gradient + j) - C::load(unit + j) * along) * (T(1) / length);
                });
            }
        // Of the SiLU: `grad_q`, `grad_k` and `grad_v` lie one behind the other, as the products do.
        C::fill(3 * size, outer + size, [&](int j) FASTWEIGHTS_INLINE_LAMBDA {
            const V x = C::load(inside + size + j), gate = C::load(now.silu + j);
            return C::load(grad_q + j) * gate * (T(1) + x * (T(1) - gate));
        });
    }

    FASTWEIGHTS_OUTLINE void differentiate_norm(std::int64_t s, const T* normalised, T factor, const T* h, const T* by_output) {
        T *const of_gain = grad_gain + s * size, *const of_bias = grad_bias + s * size;
        const T* const carried = grad_hidden + s * size;
        V total = {}, along = {};
        for (int i = 0; i < size; i += width) {
            const V gradient = C::load(h + i) > V{} ? C::load(by_output + i) + C::load(carried + i) : V{};
            const V own = C::load(normalised + i), scaled = gradient * C::load(this->gain + i);  // zero in the padding
            C::store(C::load(of_gain + i) + gradient * own, of_gain + i);
            C::store(C::load(of_bias + i) + gradient, of_bias + i);
            C::store(scaled, grad_sum + i);
            total += scaled;
            along += scaled * own;
        }
        const T mean = C::R::sum(total)[0] / T(p.size), slope = C::R::sum(along)[0] / T(p.size);
        for (int n = 0; n < heads; ++n) {
            T* const sums = grad_sum + n * wide;
            C::fill(wide, sums, [&](int j) FASTWEIGHTS_INLINE_LAMBDA {
                return (C::load(sums + j) - mean - C::load(normalised + n * wide + j) * slope) * factor;
            });
            std::fill(sums + part, sums + wide, T(0));
        }
    }

    // Of a head's q, k and v, and of the products of its gates.
    FASTWEIGHTS_OUTLINE void differentiate_head(std::int64_t s, std::int64_t i, int n, const T* missing, const T* memory,
                                               std::int64_t oldest, T* of_gates) {
        const Step now = step_of(s, i);
        T* const grad_m = grad_memory + s * matrices + std::int64_t(n) * part * wide;
        const T *const q = now.q + n * wide, *const k = now.k + n * wide, *const outer = grad_sum + n * wide;
        const T *const written = written_of(s, n, i);
        const T kept = now.gates[n], rate = now.gates[heads + n];
        T *const of_q = grad_q + n * wide, *const of_k = grad_k + n * wide, *const of_missing = grad_v + n * wide;
        // With D = gradient of M + q o^T, of what is written: k^T D.
        V weighed = {};
        const T overlap = dot(k, q, part);
        C::template for_panels<8>(wide, [&](int j, auto block) FASTWEIGHTS_INLINE_LAMBDA {
            V of_written[block];
            for (int c = 0; c < block; ++c) of_written[c] = C::load(outer + j + c * width) * overlap;
            for (int i = 0; i < part; ++i)
                for (int c = 0; c < block; ++c) of_written[c] += C::load(grad_m + i * wide + j + c * width) * k[i];
            for (int c = 0; c < block; ++c) {
                const V lacking = C::load(missing + j + c * width);
                weighed += of_written[c] * lacking;
                C::store(of_written[c] * rate, of_missing + j + c * width);
            }
        });
        pass(n, q, k, outer, written, of_missing, kept, grad_m);
        const T held = read_again(s, i, n, outer, of_missing, memory, oldest);
        const T passed = dot(written, outer, part);
        C::fill(wide, of_k, [&](int j) FASTWEIGHTS_INLINE_LAMBDA {
            return C::load(by_written + n * wide + j) + C::load(q + j) * passed - C::load(by_missing + n * wide + j) * kept;
        });
        C::fill(wide, of_q, [&](int j) FASTWEIGHTS_INLINE_LAMBDA {
            return C::load(by_read + n * wide + j) * kept + C::load(k + j) * passed;
        });
        const T kept_of = held + dot(q, by_read + n * wide, part) - dot(k, by_missing + n * wide, part);
        of_gates[n] = kept_of * kept * (T(1) - kept);
        of_gates[heads + n] = C::R::sum(weighed)[0] * rate * (T(1) - rate);
    }

    // The gradient of a head's memory: by what the step wrote, and then that of the memory before the step.
    FASTWEIGHTS_OUTLINE void pass(int n, const T* q, const T* k, const T* outer, const T* written, const T* of_missing, T kept,
                                 T* grad_m) const {
        for_rows([&](int i, auto rows, V (*sums)[width], int place) FASTWEIGHTS_INLINE_LAMBDA {
            V of_written[rows] = {};
            for (int j = 0; j < wide; j += width) {
                const V by_output = C::load(outer + j), now = C::load(written + j), lacking = C::load(of_missing + j);
                for (int r = 0; r < rows; ++r) {
                    T* const at = grad_m + std::int64_t(i + r) * wide + j;
                    const V gradient = C::load(at);
                    of_written[r] += gradient * now;
                    C::store((gradient + by_output * q[i + r] - lacking * k[i + r]) * kept, at);
                }
            }
            for (int r = 0; r < rows; ++r) sums[0][place + r] = of_written[r];
        }, [&](int i, V (*sums)[width]) FASTWEIGHTS_INLINE_LAMBDA {
            C::store(C::R::sums_of(sums[0]), by_written + n * wide + i);
        });
    }

    // The memory before a step, by two vectors and, what it returns, by its gradient behind the step: it is the one before
    // the chunk, faded, and what was written since.
    FASTWEIGHTS_OUTLINE T read_again(std::int64_t s, std::int64_t i, int n, const T* outer, const T* lacking, const T* memory,
                                    std::int64_t oldest) const {
        T *const read = by_read + n * wide, *const missed = by_missing + n * wide;
        const Step now = step_of(s, i);
        const T *const q = now.q + n * wide, *const k = now.k + n * wide;
        const int count = static_cast<int>(i - oldest);
        const T* const rows = written_of(s, n, oldest);
        V products[4 * recurrent_delta_chunk];
        for (int r = 0; r < count; ++r) {
            const T *const row = rows + r * wide, *const key = step_of(s, oldest + r).k + n * wide;
            V* const sums = products + 4 * r;
            sums[0] = sums[1] = sums[2] = sums[3] = V{};
            for (int j = 0; j < wide; j += width) {
                const V number = C::load(row + j), of_key = C::load(key + j);
                sums[0] += number * C::load(outer + j);
                sums[1] += number * C::load(lacking + j);
                sums[2] += of_key * C::load(q + j);
                sums[3] += of_key * C::load(k + j);
            }
        }
        for (int r = 4 * count; r % width != 0; ++r) products[r] = V{};
        for (int r = 0; r < 4 * count; r += width) C::store(C::R::sums_of(products + r), scores + r);
        T faded = 1, held = 0, left = 0, most = 0;
        T *const share = shares_of(shares, s, n), *const bound = shares_of(bounds, s, n);
        // A share takes what the step before it reads of it, and fades with the memory.
        const auto pass_on = [&](std::int64_t r, T gained, T lost) FASTWEIGHTS_INLINE_LAMBDA {
            held += share[r] * faded;
            bound[r] = std::max(bound[r], std::max(std::abs(gained), std::abs(lost))) * now.gates[n];
            share[r] = (share[r] + gained - lost) * now.gates[n];
            left += std::abs(share[r]) * faded;
            most += bound[r] * faded;
        };
        for (int r = count - 1; r >= 0; --r) {
            T* const of = scores + 4 * r;
            pass_on(oldest + r, of[2] * of[0], of[3] * of[1]);
            of[0] *= faded;
            of[1] *= faded;
            faded *= step_of(s, oldest + r).gates[n];
        }
        if (!memory) {
            std::fill_n(read, wide, T(0));
            std::fill_n(missed, wide, T(0));
        } else {
            const T* const m = memory + std::int64_t(n) * part * wide;
            for_rows([&](int i0, auto block, V (*sums)[width], int place) FASTWEIGHTS_INLINE_LAMBDA {
                V of_read[block] = {}, of_missed[block] = {};
                for (int j = 0; j < wide; j += width) {
                    const V by_output = C::load(outer + j), by_lacking = C::load(lacking + j);
                    for (int r = 0; r < block; ++r) {
                        const V number = C::load(m + std::int64_t(i0 + r) * wide + j);
                        of_read[r] += number * by_output;
                        of_missed[r] += number * by_lacking;
                    }
                }
                for (int r = 0; r < block; ++r) {
                    sums[0][place + r] = of_read[r];
                    sums[1][place + r] = of_missed[r];
                }
            }, [&](int i0, V (*sums)[width]) FASTWEIGHTS_INLINE_LAMBDA {
                C::store(C::R::sums_of(sums[0]), read + i0);
                C::store(C::R::sums_of(sums[1]), missed + i0);
            });
            pass_on(recurrent_delta_chunk, dot(q, read, part), dot(k, missed, part));
        }
        // What the rule itself takes away, of a key that comes again, leaves the rounding of what was there.
        if (left < most / 16) this->share(s, n, i, memory);
        C::for_panels(wide, [&](int j, auto block) FASTWEIGHTS_INLINE_LAMBDA {
            V of_read[block], of_missed[block];
            for (int c = 0; c < block; ++c) {
                of_read[c] = C::load(read + j + c * width) * faded;
                of_missed[c] = C::load(missed + j + c * width) * faded;
            }
            for (int r = 0; r < count; ++r) {
                const T* const key = step_of(s, oldest + r).k + n * wide + j;
                for (int c = 0; c < block; ++c) {
                    const V number = C::load(key + c * width);
                    of_read[c] += number * scores[4 * r];
                    of_missed[c] += number * scores[4 * r + 1];
                }
            }
            for (int c = 0; c < block; ++c) {
                C::store(of_read[c], read + j + c * width);
                C::store(of_missed[c], missed + j + c * width);
            }
        });
        return held;
    }

    // Up to four rows of a matrix at a time, and at the end of each register of them what is summed along the rows.
    template <class Rows, class End>
    FASTWEIGHTS_INLINE void for_rows(Rows rows, End end) const {
        constexpr int team = std::min(4, width);
        for (int i = 0; i < part; i += width) {
            V sums[2][width];
            for (int first = 0; first < width; first += team) {
                if (i + first + team <= part) {
                    rows(i + first, std::integral_constant<int, team>{}, sums, first);
                    continue;
                }
                for (int r = first; r < first + team; ++r) {
                    sums[0][r] = sums[1][r] = V{};
                    if (i + r < part) rows(i + r, std::integral_constant<int, 1>{}, sums, r);
                }
            }
            end(i, sums);
        }
    }
};

}  // namespace fastweights
