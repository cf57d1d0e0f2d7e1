#include "pool.hpp"

#ifndef _WIN32
#include <pthread.h>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace fastweights {
namespace {

class Pool {
  public:
    void run(int items, int threads, const std::function<void(int)>& task) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (static_cast<int>(workers_.size()) < threads - 1) {
                const int index = static_cast<int>(workers_.size());
                workers_.emplace_back([this, index] { serve(index); });
            }
            task_ = &task;
            items_ = items;
            next_ = 0;
            invited_ = threads - 1;
            busy_ = threads - 1;
            error_ = nullptr;
            ++round_;
        }
        start_.notify_all();
        work();
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return busy_ == 0; });
        if (error_) std::rethrow_exception(error_);
    }

  private:
    void serve(int index) {
        unsigned long seen = 0;
        for (;;) {
            std::unique_lock<std::mutex> lock(mutex_);
            start_.wait(lock, [&] { return round_ != seen; });
            seen = round_;
            if (index >= invited_) continue;
            lock.unlock();
            work();
            lock.lock();
            if (--busy_ == 0) done_.notify_one();
        }
    }

    void work() {
        for (int item; (item = next_.fetch_add(1)) < items_;) {
            try {
                (*task_)(item);
            } catch (...) {
                std::lock_guard<std::mutex> lock(mutex_);
                if (!error_) error_ = std::current_exception();
            }
        }
    }

    std::mutex mutex_;
    std::condition_variable start_, done_;
    std::vector<std::thread> workers_;
    const std::function<void(int)>* task_ = nullptr;
    std::atomic<int> next_{0};
    std::exception_ptr error_;
    int items_ = 0, invited_ = 0, busy_ = 0;
    unsigned long round_ = 0;
};

// Never destroyed: its threads sleep in it until the process ends.
std::mutex pool_mutex;
Pool* pool = nullptr;

#ifndef _WIN32
// A forked child has none of its parent's threads and starts a pool of its own.
void forget_after_fork() {
    new (&pool_mutex) std::mutex;
    pool = nullptr;
}

const int watch_forks = pthread_atfork(nullptr, nullptr, forget_after_fork);
#endif

}  // namespace

void parallel_for(int items, int threads, const std::function<void(int)>& task) {
    threads = std::min(threads, items);
    std::unique_lock<std::mutex> lock(pool_mutex, std::defer_lock);
    // A second caller at the same time (another Python thread) does its work alone rather than wait for the pool.
    if (threads < 2 || !lock.try_lock()) {
        for (int item = 0; item < items; ++item) task(item);
        return;
    }
    if (pool == nullptr) pool = new Pool;
    pool->run(items, threads, task);
}

}  // namespace fastweights
