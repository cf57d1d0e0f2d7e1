// The gradient of one head of one sequence of the delta family, from its last chunk to its first, in delta.hpp's names.
#pragma once

#include "delta.hpp"

namespace fastweights {

template <class T>
struct DeltaGradients {
    T *q, *k;                      // [slices,B,T,key heads,K], to be summed over the slices
    T *v, *g, *beta, *a, *b;  // null where the input is
    T* skip;                  // [B,H], or of each packed sequence, to be summed over them
    T* state;
};

// One head of one sequence, at each level: delta_level.cpp.
#define FASTWEIGHTS_VARIANT(T, NAME, TARGET, BYTES)                                                                    \
    void forward_##NAME(const DeltaProblem& p, const DeltaInputs<T>& in, std::int64_t item,                            \
                        const DeltaResults<T>& out);                                                                   \
    void backward_##NAME(const DeltaProblem& p, const DeltaInputs<T>& in, std::int64_t item, const T* trace,           \
                         const T* grad_outputs, const T* grad_final, const DeltaGradients<T>& out);
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, float)
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, double)
#undef FASTWEIGHTS_VARIANT

template <class T, int Bytes>
struct DeltaBackwardHead : DeltaHead<T, Bytes> {
    using Base = DeltaHead<T, Bytes>;
    using typename Base::C, typename Base::R, typename Base::M, typename Base::P, typename Base::V, typename Base::Pairs;
    using Base::width;
    using Base::p, Base::in, Base::keys, Base::values, Base::decays, Base::key_pitch, Base::value_pitch, Base::step_pitch;
    using Base::q, Base::k, Base::scaled, Base::k_columns, Base::value, Base::read, Base::written, Base::out;
    using Base::decay, Base::attention, Base::overlap, Base::mixing, Base::state, Base::kept, Base::left, Base::rate;
    using Base::factors, Base::kept_rows, Base::kept_q, Base::kept_k;
    using Base::a, Base::b, Base::kept_a, Base::b_columns, Base::b_attention, Base::b_overlap;
    using Base::chunk_q, Base::chunk_k, Base::cuts, Base::take, Base::product, Base::lower, Base::padded;

    // Of a chunk, summed over the slice's heads: [chunk,K], and of q_i.k_j and k_i.k_j, [chunk,chunk].
    T *chunk_grad_q, *chunk_grad_k, *chunk_grad_attention, *chunk_grad_overlap;
    // Where all channels of a step decay alike, [K,chunk]: the same of q and k by the state; q; and of one head.
    T *grad_q_columns, *grad_k_columns, *q_columns, *own_columns;
    T* out_columns;                      // [V,chunk]
    std::int64_t begun[delta_chunk];     // heads with a part that begins there
    T *own_grad_q, *own_grad_k;          // of one head, [chunk,K]
    T *grad_q, *grad_k;                  // either of the two
    T *grad_written;                     // [chunk,V]: of U, then of beta (V - d K S)
    T *grad_pairs, *written_columns;     // [chunk,chunk], [V,chunk]
    T *grad_states, *grad_state;         // [slice,K,V], and one of them
    T *state_rows, *grad_state_rows;     // [V,K]
    double slope[delta_chunk];           // of G; much of it cancels
    // Where channels decay by themselves: of d K and of g, [chunk,K]; rows of sums along the steps, [3,K]; the keys of the
    // pairs at each step.
    T *grad_kept_k, *grad_g, *sums, *room;
    // With matrices of rank one: of a, b and d a, [chunk+1,K], w b; of V, and V transposed; of the rows b and U what
    // `grad_pairs` is; of both A, [chunk+1,chunk].
    T *grad_a, *grad_b, *grad_kept_a, *b_scaled, *grad_value, *value_columns;
    T *grad_b_pairs, *grad_overlap, *grad_b_overlap;

    static std::int64_t more_numbers(const DeltaProblem& p, bool dplr) {
        const std::int64_t key = Base::pitch_of(p.keys), value = Base::pitch_of(p.values);
        const std::int64_t step = Base::pitch_of(delta_chunk);
        const std::int64_t of_channels =
            (4 * delta_chunk + 3) * key + 2 * p.values * key + Pairs::room_of(delta_chunk);
        const std::int64_t of_steps = (4 * p.keys + p.values) * step;
        return delta_chunk * (2 * key + value + 3 * step) + p.values * step + most_in_slice(p) * p.keys * value +
               (p.channels ? of_channels : of_steps) +
               (dplr ? 4 * (delta_chunk + 1) * key + delta_chunk * value + (p.values + 3 * delta_chunk + 2) * step : 0);
    }

    FASTWEIGHTS_INLINE DeltaBackwardHead(const DeltaProblem& problem, const DeltaInputs<T>& inputs)
        : Base(problem, inputs, more_numbers(problem, inputs.a)) {
        chunk_grad_q = take(delta_chunk, key_pitch);
        chunk_grad_k = take(delta_chunk, key_pitch);
        chunk_grad_attention = this->take_raw(delta_chunk, step_pitch);
        chunk_grad_overlap = this->take_raw(delta_chunk, step_pitch);
        grad_written = take(delta_chunk, value_pitch);
        grad_pairs = take(delta_chunk, step_pitch);
        written_columns = take(values, step_pitch);
        grad_states = take(most_in_slice(p) * keys, value_pitch);
        if (!p.channels) {
            for (T** columns : {&grad_q_columns, &grad_k_columns, &q_columns, &own_columns})
                *columns = take(keys, step_pitch);
            out_columns = take(values, step_pitch);
            return;
        }
        grad_q = own_grad_q = take(delta_chunk, key_pitch);
        grad_k = own_grad_k = take(delta_chunk, key_pitch);
        state_rows = take(values, key_pitch);
        grad_state_rows = take(values, key_pitch);
        grad_kept_k = take(delta_chunk, key_pitch);
        grad_g = take(delta_chunk, key_pitch);
        sums = take(3, key_pitch);
        room = take(1, Pairs::room_of(delta_chunk));
        if (!in.a) return;
        for (T** rows : {&grad_a, &grad_b, &grad_kept_a, &b_scaled}) *rows = take(delta_chunk + 1, key_pitch);
        grad_value = take(delta_chunk, value_pitch);
        value_columns = take(values, step_pitch);
        grad_b_pairs = take(delta_chunk, step_pitch);
        grad_overlap = take(delta_chunk + 1, step_pitch);
        grad_b_overlap = take(delta_chunk + 1, step_pitch);
    }

    FASTWEIGHTS_INLINE void backward(std::int64_t item, const T* trace, const T* grad_outputs, const T* grad_final,
                                     DeltaGradients<T> to) {
        const std::int64_t whole = std::int64_t(keys) * values;
        this->begin_slice(item);
        const std::int64_t numbers = (in.bounds ? 1 : p.batch) * p.steps * p.key_heads * keys;
        to.q += this->slice * numbers;
        to.k += this->slice * numbers;
        for (std::int64_t h = this->from_head; h < this->end_head; ++h) {
            begin_head(h);
            if (to.skip) to.skip[this->place] = 0;
            this->load_matrix(grad_final ? grad_final + this->place * whole : nullptr, grad_state);
        }
        for (std::int64_t c = (this->length + delta_chunk - 1) / delta_chunk - 1; c >= 0; --c) {
            const std::int64_t t = c * delta_chunk;
            const int count = static_cast<int>(std::min<std::int64_t>(delta_chunk, this->length - t));
            this->load_keys(t);
            begin_keys(count);
            for (std::int64_t h = this->from_head; h < this->end_head; ++h) {
                begin_head(h);
                backward_chunk(t, trace + (this->first_chunk + c) * whole, grad_outputs, to);
            }
            if (!in.a) store_keys(t, count, to);
        }
        for (std::int64_t t = this->length; t < this->end; ++t)
            for (T* gradient : {to.q, to.k}) std::fill_n(gradient + key_place(t), keys, T(0));
        for (std::int64_t h = this->from_head; h < this->end_head; ++h) {
            begin_head(h);
            this->clear_past(to.v, values);
            if (to.g) this->clear_past(to.g, decays);
            if (to.beta) this->clear_past(to.beta, 1);
            if (to.a) this->clear_past(to.a, keys);
            if (to.b) this->clear_past(to.b, keys);
            if (to.state) this->store_state(grad_state, to.state + this->place * whole);
        }
    }

  private:
    FASTWEIGHTS_INLINE bool is_alone() const { return this->end_head - this->from_head == 1; }
    FASTWEIGHTS_INLINE void begin_head(std::int64_t h) {
        Base::begin_head(h);
        grad_state = grad_states + (h - this->from_head) * keys * value_pitch;
    }

    FASTWEIGHTS_OUTLINE void backward_chunk(std::int64_t t, const T* before, const T* grad_outputs,
                                            const DeltaGradients<T>& to) {
        for (int part = this->cut(t) - 1; part >= 0; --part) {
            const std::int64_t from = t + cuts[part];
            const bool anew = this->anew(from);
            ++begun[cuts[part]];
            this->load_matrix(anew ? nullptr : before, state);
            const int count = cuts[part + 1] - cuts[part];
            if (in.a) backward_dplr_part(from, count, grad_outputs, to);
            else backward_part(from, count, cuts[part], grad_outputs, to);
            if (!anew) continue;
            this->clear(grad_state, keys, value_pitch);
            if (to.g) std::fill_n(to.g + (this->first + from * p.heads) * decays, decays, T(0));
        }
    }

    FASTWEIGHTS_INLINE std::int64_t key_place(std::int64_t t) const { return (this->first_key + t * p.key_heads) * keys; }
    // The sums over the slice's heads, of a chunk.
    FASTWEIGHTS_OUTLINE void begin_keys(int count) {
        std::fill_n(begun, count, 0);
        if (p.channels) {
            if (is_alone()) return;
            for (T* sums : {chunk_grad_q, chunk_grad_k}) this->clear(sums, count, key_pitch);
            return;
        }
        C::transpose(chunk_q, key_pitch, count, keys, q_columns, step_pitch);
        for (T* sums : {grad_q_columns, grad_k_columns}) this->clear(sums, keys, step_pitch);
        for (T* sums : {chunk_grad_attention, chunk_grad_overlap}) this->clear(sums, count, step_pitch);
    }
    // Of q and k, of a chunk: what they have by the pairs of its steps, for all heads of the slice at once.
    FASTWEIGHTS_OUTLINE void store_keys(std::int64_t t, int count, const DeltaGradients<T>& to) const {
        if (!p.channels) {
            C::transpose(grad_q_columns, step_pitch, keys, count, chunk_grad_q, key_pitch);
            C::transpose(grad_k_columns, step_pitch, keys, count, chunk_grad_k, key_pitch);
        }
        // What no head keeps reaches no later step: zeros would let through what is not a number.
        for (int row = 0, next; !p.channels && row < count; row = next) {
            for (next = row + 1; next < count && begun[next] < this->end_head - this->from_head;) ++next;
            const std::int64_t at = row * key_pitch, pairs = row * (step_pitch + 1);
            const auto add = [&](const T* sums, const T* by_q, T* of_q) FASTWEIGHTS_INLINE_LAMBDA {
                lower(next - row, keys, sums + pairs, chunk_k + at, key_pitch, of_q + at, key_pitch);
                lower_transposed(next - row, keys, sums + pairs, by_q + at, key_pitch, chunk_grad_k + at, key_pitch);
            };
            add(chunk_grad_attention, chunk_q, chunk_grad_q);
            if (p.correct) add(chunk_grad_overlap, chunk_k, chunk_grad_k);
        }
        for (int i = 0; i < count; ++i) {
            C::copy(chunk_grad_q + i * key_pitch, keys, to.q + key_place(t + i));
            C::copy(chunk_grad_k + i * key_pitch, keys, to.k + key_place(t + i));
        }
    }
    // Adds what q and k of a part that begins with a row of the chunk have by this head.
    FASTWEIGHTS_OUTLINE void add_keys(int row, int count) const {
        T *const of_q = chunk_grad_q + row * key_pitch, *const of_k = chunk_grad_k + row * key_pitch;
        const bool first = is_alone();
        for (std::int64_t c = 0; c < count * key_pitch; ++c) {
            of_q[c] = first ? grad_q[c] : of_q[c] + grad_q[c];
            of_k[c] = first ? grad_k[c] : of_k[c] + grad_k[c];
        }
    }

    // y += a^T b for a lower triangular matrix of the part's steps: a lower one where steps are counted from the last.
    FASTWEIGHTS_INLINE void lower_transposed(int count, int columns, const T* a, const T* b, std::int64_t b_pitch, T* y,
                                             std::int64_t y_pitch) const {
        const std::int64_t last = count - 1;
        M::run({P::lower, count, padded(columns), 0, a + last * step_pitch + last, -1, -step_pitch,
                b + last * b_pitch, -b_pitch, y + last * y_pitch, -y_pitch, true});
    }

    FASTWEIGHTS_OUTLINE T dot(const T* x, const T* y, int size) const {
        return C::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return C::load(x + i) * C::load(y + i); })[0];
    }

    // The decays of the pairs of steps have a part in G of both.
    FASTWEIGHTS_OUTLINE void add_slopes(int i, int count, const T* gradient, const T* pairs) {
        double sum = 0;
        for (int j = 0; j < count; ++j) {
            const double product = gradient[j] * pairs[j];
            slope[j] -= product;
            sum += product;
        }
        slope[i] += sum;
    }

    FASTWEIGHTS_OUTLINE void backward_part(std::int64_t t, int count, int row, const T* grad_outputs,
                                           const DeltaGradients<T>& to) {
        const int across = padded(count);
        this->prepare(t, count, row);
        this->load_rows(grad_outputs, values, t, count, out, value_pitch);
        if (in.skip) differentiate_skip(count, to);
        this->scale_all(out, count, value_pitch, T(p.scale));
        C::transpose(written, value_pitch, count, values, written_columns, step_pitch);

        // Of U: by the next state, and by the outputs. Of P.
        if (p.channels) C::transpose(this->k_columns, step_pitch, keys, count, scaled, key_pitch);
        product(count, values, keys, p.channels ? scaled : k, key_pitch, 1, grad_state, grad_written);
        if (!p.channels) this->scale_rows(grad_written, count, value_pitch, left);
        lower_transposed(count, values, attention, out, value_pitch, grad_written, value_pitch);
        this->pair(count, values, out, value_pitch, written_columns, grad_pairs);
        if (p.channels) differentiate_channels(t, count, row, across, to);
        else differentiate_steps(t, count, row, across, to);

        for (int i = 0; i < count; ++i) {
            T* const gradient = grad_written + i * value_pitch;
            const T* const skipped = read + i * value_pitch;
            for (int j = 0; j < values; ++j) gradient[j] = in.skip ? rate[i] * gradient[j] + skipped[j] : rate[i] * gradient[j];
        }
        this->store_rows(grad_written, value_pitch, count, values, to.v, t);
    }

    // Of the values by the outputs that they went into as they are: left in `read`, which an additive rule has no use for.
    FASTWEIGHTS_OUTLINE void differentiate_skip(int count, const DeltaGradients<T>& to) {
        const T skip = in.skip[this->head()];
        T sum = 0;
        for (int i = 0; i < count; ++i) {
            const T* const outer = out + i * value_pitch;
            for (int j = 0; j < values; ++j) read[i * value_pitch + j] = skip * outer[j];
            sum += dot(outer, value + i * value_pitch, values);
        }
        to.skip[this->place] += sum;
    }

    FASTWEIGHTS_OUTLINE void backward_dplr_part(std::int64_t t, int count, const T* grad_outputs,
                                                const DeltaGradients<T>& to);  // dplr.hpp

    // Of q or k by one head, from the state or into it: the product of a matrix [K,V] with rows [count,V], its columns times
    // factors or 1. Adds it to the slice's sums from a step of the chunk on; returns each step's product with q or k.
    FASTWEIGHTS_OUTLINE void add_columns(int count, int row, const T* matrix, const T* rows, const T* factors,
                                         const T* of_keys, T* to, T* products) {
        C::transpose(rows, value_pitch, count, values, out_columns, step_pitch);
        product(keys, count, values, matrix, value_pitch, 1, out_columns, step_pitch, own_columns, step_pitch);
        C::for_panels(padded(count), [&](int j, auto block) FASTWEIGHTS_INLINE_LAMBDA {
            V sum[block] = {}, factor[block];
            for (int n = 0; n < block; ++n)
                factor[n] = factors ? C::load(factors + j + n * width) : V{} + T(1);
            for (int c = 0; c < keys; ++c)
                for (int n = 0; n < block; ++n) {
                    const std::int64_t place = c * step_pitch + row + j + n * width;
                    const V own = C::load(own_columns + place - row) * factor[n];
                    sum[n] += own * C::load(of_keys + place);
                    // What is past the part's last step belongs to the next part, and may be no number.
                    const int rest = count - j - n * width;
                    C::store(C::load(to + place) + (rest < width ? R::head(own, rest) : own), to + place);
                }
            for (int n = 0; n < block; ++n) C::store(sum[n], products + j + n * width);
        });
    }

    // The rest of the gradients of q, k, g, beta and the state before, where all channels of a step decay alike.
    FASTWEIGHTS_OUTLINE void differentiate_steps(std::int64_t t, int count, int row, int across,
                                                 const DeltaGradients<T>& to) {
        const int last = count - 1;
        T by_state[delta_chunk], written_into[delta_chunk];
        add_columns(count, row, state, out, kept, q_columns, grad_q_columns, by_state);
        add_columns(count, row, grad_state, written, left, this->k_columns, grad_k_columns, written_into);
        std::fill_n(slope, delta_chunk, 0.0);
        for (int i = 0; i < count; ++i) {
            slope[i] += double(by_state[i]) - written_into[i];
            slope[last] += written_into[i];
        }

        for (int i = 0; i < count; ++i) {
            T* const pairs = grad_pairs + i * step_pitch;
            if (to.g) add_slopes(i, i + 1, pairs, attention + i * step_pitch);
            T* const sums = chunk_grad_attention + (row + i) * step_pitch + row;
            for (int j = 0; j <= i; ++j) sums[j] += pairs[j] * decay[i * step_pitch + j];
        }

        if (to.g) {
            T sum = 0;
            for (int i = 0; i < keys; ++i) sum += dot(state + i * value_pitch, grad_state + i * value_pitch, values);
            slope[last] += kept[last] * sum;
        }
        this->scale_all(grad_state, keys, value_pitch, kept[last]);
        this->scale_rows(out, count, value_pitch, kept);
        product(keys, values, count, q, 1, key_pitch, out, grad_state, true);
        if (p.correct) undo_correction(count, row, across, to);
        store_rates(t, count, grad_pairs, to);
        if (!to.g) return;
        double sum = 0;
        for (int i = last; i >= 0; --i) to.g[this->first + (t + i) * p.heads] = T(sum += slope[i]);
    }

    // Of the state before, as far as it is kept and q reads it, where every channel decays by itself; `of_state`, [K], is the
    // part that this has in the gradient of each step's log of a decay.
    FASTWEIGHTS_OUTLINE void differentiate_state(int count, T* of_state) {
        const T* const kept_all = kept_rows + (count - 1) * key_pitch;
        for (int c = 0; c < keys; ++c)
            of_state[c] = kept_all[c] * dot(state + c * value_pitch, grad_state + c * value_pitch, values);
        this->scale_rows(grad_state, keys, value_pitch, kept_all);
        product(keys, values, count, kept_q, 1, key_pitch, out, grad_state, true);
    }

    // The same where every channel decays by itself. The gradient of a decay is a sum over what it weakens, and no difference
    // of two larger sums, of which nothing might be left.
    FASTWEIGHTS_OUTLINE void differentiate_channels(std::int64_t t, int count, int row, int across,
                                                    const DeltaGradients<T>& to) {
        const int last = count - 1, wide = padded(keys);
        // A part of several has rows of its own: what is past its last step, zeros or no numbers, must not reach the next.
        const bool whole = row == 0 && count == std::min<std::int64_t>(delta_chunk, this->length - t);
        grad_q = is_alone() && whole ? chunk_grad_q : own_grad_q;
        grad_k = is_alone() && whole ? chunk_grad_k : own_grad_k;
        // Of d Q and w K: by what is read of the state, and by what is written into it.
        C::transpose(state, value_pitch, keys, values, state_rows, key_pitch);
        C::transpose(grad_state, value_pitch, keys, values, grad_state_rows, key_pitch);
        product(count, keys, values, out, value_pitch, 1, state_rows, key_pitch, grad_q, key_pitch);
        product(count, keys, values, written, value_pitch, 1, grad_state_rows, key_pitch, grad_k, key_pitch);
        T *const of_state = sums, *const before = sums + key_pitch, *const after = sums + 2 * key_pitch;
        differentiate_state(count, of_state);
        if (p.correct) {
            solve_transposed(count);
            this->pair(count, values, grad_written, value_pitch, written_columns, decay);
            for (int i = 0; i < count; ++i) {
                // The gradient of A, and of the products in it, in the place of P, which has been used.
                for (int j = 0; j < across; ++j) {
                    T& gradient = decay[i * step_pitch + j];
                    gradient = j < i ? -gradient : T(0);
                    attention[i * step_pitch + j] = gradient * rate[i];
                }
                for (int j = 0; j < values; ++j)
                    out[i * value_pitch + j] = -rate[i] * grad_written[i * value_pitch + j];
            }
            product(count, keys, values, out, value_pitch, 1, state_rows, key_pitch, grad_kept_k, key_pitch);
            product(keys, values, count, kept_k, 1, key_pitch, out, grad_state, true);
        } else {
            this->clear(attention, count, step_pitch);
        }
        store_rates(t, count, decay, to);

        std::fill_n(before, wide, T(0));
        for (int i = 0; i < count; ++i)
            for (int c = 0; c < wide; ++c) {
                const std::int64_t place = i * key_pitch + c;
                grad_g[place] = of_state[c] + before[c];
                before[c] += scaled[place] * grad_k[place];
            }
        T* const left_rows = before;
        std::fill_n(left_rows, wide, T(1));
        std::fill_n(after, wide, T(0));
        for (int i = last; i >= 0; --i)
            for (int c = 0; c < wide; ++c) {
                const std::int64_t place = i * key_pitch + c;
                grad_g[place] += after[c] += kept_q[place] * grad_q[place] + kept_k[place] * grad_kept_k[place];
                grad_q[place] *= kept_rows[place];
                grad_k[place] = left_rows[c] * grad_k[place] + kept_rows[place] * grad_kept_k[place];
                left_rows[c] *= factors[place];
            }
        for (T* pairs : {grad_pairs, attention}) std::fill(pairs + count * step_pitch, pairs + delta_chunk * step_pitch, T(0));
        Pairs::differentiate(this->steps_of(count), grad_pairs, attention, step_pitch, room, {grad_q, grad_k, grad_k, false},
                             grad_g);
        if (to.g) store_decays(t, count, to);
        if (grad_q != chunk_grad_q) add_keys(row, count);
    }
    FASTWEIGHTS_INLINE void store_decays(std::int64_t t, int count, const DeltaGradients<T>& to) const {
        // The log of a factor that is zero: any other number as low leaves zero too.
        for (int i = 0; i < count; ++i)
            for (int c = 0; c < keys; ++c)
                if (factors[i * key_pitch + c] == 0) grad_g[i * key_pitch + c] = 0;
        this->store_rows(grad_g, key_pitch, count, keys, to.g, t);
    }

    // Of beta, which the values to write and `of_mixing`, the gradient of A, were multiplied by.
    FASTWEIGHTS_INLINE void store_rates(std::int64_t t, int count, const T* of_mixing, const DeltaGradients<T>& to) const {
        for (int i = 0; to.beta && i < count; ++i) {
            T sum = dot(grad_written + i * value_pitch, value + i * value_pitch, values);
            if (p.correct) sum += dot(of_mixing + i * step_pitch, overlap + i * step_pitch, count);
            to.beta[this->first + (t + i) * p.heads] = sum;
        }
    }

    // The gradient of what is written becomes that of beta (V - d K S).
    FASTWEIGHTS_INLINE void solve_transposed(int count) const {
        const std::int64_t end = count - 1;
        M::run({P::solve, count, padded(values), 0, mixing + end * step_pitch + end, -1, -step_pitch, nullptr, 0,
                grad_written + end * value_pitch, -value_pitch, true});
    }

    // Through (I + A)^-1, and through what was read of the state before it was written; leaves the gradient of A in
    // `grad_pairs`.
    FASTWEIGHTS_OUTLINE void undo_correction(int count, int row, int across, const DeltaGradients<T>& to) {
        solve_transposed(count);
        this->pair(count, values, grad_written, value_pitch, written_columns, grad_pairs);
        for (int i = 0; i < count; ++i) {
            T* const pairs = grad_pairs + i * step_pitch;
            for (int j = 0; j < across; ++j) pairs[j] = j < i ? -pairs[j] : T(0);
            if (to.g) add_slopes(i, i, pairs, mixing + i * step_pitch);
            T* const sums = chunk_grad_overlap + (row + i) * step_pitch + row;
            for (int j = 0; j < i; ++j) sums[j] += pairs[j] * decay[i * step_pitch + j] * rate[i];
            for (int j = 0; j < values; ++j)
                out[i * value_pitch + j] = -rate[i] * kept[i] * grad_written[i * value_pitch + j];
        }
        T read_by_keys[delta_chunk];
        add_columns(count, row, state, out, nullptr, this->k_columns, grad_k_columns, read_by_keys);
        for (int i = 0; i < count; ++i) slope[i] += read_by_keys[i];
        product(keys, values, count, k, 1, key_pitch, out, grad_state, true);
    }
};

}  // namespace fastweights
