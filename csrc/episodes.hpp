// Sequences cut into episodes where they restart: a kernel that takes one sequence at a time works on each as on a
// sequence of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fastweights {

struct Episode {
    std::int64_t b, begin;      // the sequence in the batch, and the step of it at which the episode begins
    std::int64_t length, span;  // its steps, and those of the tensors that are its own: past a length too, in the last
    bool anew;                  // it begins with zeros, whatever state was given

    bool is_given() const { return begin == 0 && !anew; }  // it begins with the state that was given
    bool is_last(std::int64_t steps) const { return begin + span == steps; }
};

// Those of all sequences, in order; lengths [B] and starts [T,B] may be null.
inline std::vector<Episode> cut(std::int64_t steps, std::int64_t batch, const std::int64_t* lengths, const bool* starts) {
    std::vector<Episode> episodes;
    episodes.reserve(batch);
    for (std::int64_t b = 0; b < batch; ++b) {
        const std::int64_t length = lengths ? lengths[b] : steps;
        Episode episode{b, 0, length, steps, starts && length > 0 && starts[b]};
        for (std::int64_t t = 1; starts && t < length; ++t) {
            if (!starts[t * batch + b]) continue;
            const std::int64_t taken = t - episode.begin;
            episodes.push_back({b, episode.begin, taken, taken, episode.anew});
            episode = {b, t, length - t, steps - t, true};
        }
        episodes.push_back(episode);
    }
    return episodes;
}

// Where nobody reads the state that was given, its gradient is zero.
template <class T>
void clear_unread(const std::vector<Episode>& episodes, std::int64_t numbers, T* gradient) {
    for (const Episode& episode : episodes)
        if (episode.begin == 0 && episode.anew) std::fill_n(gradient + episode.b * numbers, numbers, T(0));
}

}  // namespace fastweights
