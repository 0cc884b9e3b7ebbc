#include "thread_pool.hpp"

#include <algorithm>

namespace ivy {

ThreadPool::~ThreadPool() {
    {
        const std::lock_guard lock(mutex_);
        closed_ = true;
    }
    waiting_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(Task& task, unsigned helpers) {
    helpers = std::min(helpers, num_threads_);
    if (helpers == 0) return task.work();
    {
        const std::lock_guard lock(mutex_);
        start();
        task.wanted_ = helpers;
        task.next_ = nullptr;
        *last_ = &task;
        last_ = &task.next_;
    }
    for (unsigned i = 0; i < helpers; ++i) waiting_.notify_one();
    task.work();
    std::unique_lock lock(mutex_);
    if (task.wanted_ > 0) remove(task);
    finished_.wait(lock, [&] { return task.running_ == 0; });
}

void ThreadPool::start() {
    while (threads_.size() < num_threads_) threads_.emplace_back([this] { serve(); });
}

void ThreadPool::serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
        waiting_.wait(lock, [this] { return closed_ || first_ != nullptr; });
        if (closed_) return;
        Task& task = *first_;
        ++task.running_;
        if (--task.wanted_ == 0) remove(task);
        lock.unlock();
        task.work();
        lock.lock();
        if (--task.running_ == 0) finished_.notify_all();
    }
}

void ThreadPool::remove(Task& task) {
    Task** place = &first_;
    while (*place != &task) place = &(*place)->next_;
    *place = task.next_;
    if (last_ == &task.next_) last_ = place;
    task.wanted_ = 0;
}

}  // namespace ivy
