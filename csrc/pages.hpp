// Large pages for memory that a kernel is about to fill: the system makes fresh memory page by page, and a fault for every
// 4 KiB can take longer than what is computed in it. Where a system gives large pages to those who ask, this asks.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace fastweights {

constexpr std::size_t least_in_large_pages = std::size_t(4) << 20;  // two of 2 MiB, of which one is whole at any address

inline void prefer_large_pages(void* start, std::size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (bytes < least_in_large_pages) return;
    static const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto first = (reinterpret_cast<std::uintptr_t>(start) + page - 1) / page * page;
    const auto end = (reinterpret_cast<std::uintptr_t>(start) + bytes) / page * page;
    madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);  // a wish: what it returns does not matter
#else
    (void)start, (void)bytes;
#endif
}

}  // namespace fastweights
