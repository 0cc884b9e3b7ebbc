// Threads that wait for tasks of which several can do a part at once. Starts with its first task; no
// allocation per task.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace ivy {

class ThreadPool {
public:
    // Something that several threads can work on until nothing is left.
    class Task {
    public:
        virtual ~Task() = default;
        virtual void work() noexcept = 0;

    private:
        friend class ThreadPool;
        Task* next_ = nullptr;
        unsigned wanted_ = 0, running_ = 0;
    };

    explicit ThreadPool(unsigned num_threads) : num_threads_(num_threads) {}
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    unsigned num_threads() const { return num_threads_; }

    // Works on `task` in this thread, and in up to `helpers` others that are free; returns when all are done.
    void run(Task& task, unsigned helpers);

private:
    void serve();
    void start();
    void remove(Task& task);

    const unsigned num_threads_;
    std::mutex mutex_;
    std::condition_variable waiting_, finished_;
    Task* first_ = nullptr;  // tasks that want more helpers
    Task** last_ = &first_;
    bool closed_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace ivy
