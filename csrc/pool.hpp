// A small pool of threads that sleep between calls: no spinning, so it never fights torch's own threads for the cores.
#pragma once

#include <functional>

namespace fastweights {

// Calls task(item) for every item in [0, items), on at most `threads` threads, the caller's among them.
// Which thread takes which item is not fixed: a task must not depend on it. The first exception is thrown on.
void parallel_for(int items, int threads, const std::function<void(int)>& task);

}  // namespace fastweights
