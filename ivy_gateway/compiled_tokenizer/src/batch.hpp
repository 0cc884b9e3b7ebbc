// Many texts at once, each in its frame of special tokens: flat ids out, over the threads of a pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "model.hpp"
#include "thread_pool.hpp"

namespace ivy {

// What stands around a text, and how much of it may stay.
struct Frame {
    struct Side {
        std::vector<std::int32_t> ids, segments;  // of one length
    };

    Side prefix, suffix;
    std::int32_t text_segment = 0;
    std::size_t room = Model::kNoLimit;  // tokens of the text itself
    bool keeps_end = false;              // the end of a text that is too long stays, not its start

    std::size_t num_special() const { return prefix.ids.size() + suffix.ids.size(); }
};

// One text of a batch, and after `run` where its tokens are.
struct Item {
    Text text;
    const Frame* frame = nullptr;
    const Scratch* owner = nullptr;
    std::size_t first = 0, count = 0;  // the tokens that stay, in the owner's
    enum class State : std::uint8_t { Whole, Cut, NotUnicode, NotEncoded } state = State::Whole;

    std::size_t num_tokens() const { return count + frame->num_special(); }
};

class BatchEncoder;

// The memory of one call, lent by a `BatchEncoder`: fill `items`, call `run`, read the tokens.
class Batch final : private ThreadPool::Task {
public:
    Vector<Item> items;

    void run();

    // Each with room for `num_tokens` of all items; `segments` may be null.
    void write(std::int32_t* ids, std::int32_t* segments) const;

private:
    friend class BatchEncoder;
    explicit Batch(BatchEncoder& encoder) : encoder_(encoder) {}

    void work() noexcept override;
    void encode(Item& item, Scratch& scratch) const;
    std::size_t num_helpers() const;

    BatchEncoder& encoder_;
    std::atomic<std::size_t> next_{0};
    std::mutex mutex_;
    Vector<std::unique_ptr<Scratch>> scratches_;  // that hold this batch's tokens
};

class BatchEncoder {
public:
    // `num_threads`: that work on a batch besides the caller's.
    BatchEncoder(std::unique_ptr<const Model> model, unsigned num_threads)
        : model_(std::move(model)), pool_(num_threads) {}

    const Model& model() const { return *model_; }

    // A batch of its own for each caller; it goes back with `give_back`.
    std::unique_ptr<Batch> lend_batch();
    void give_back(std::unique_ptr<Batch> batch);

private:
    friend class Batch;
    std::unique_ptr<Scratch> lend_scratch();

    std::unique_ptr<const Model> model_;
    std::mutex mutex_;
    Vector<std::unique_ptr<Batch>> batches_;
    Vector<std::unique_ptr<Scratch>> scratches_;
    ThreadPool pool_;  // last: its threads end first
};

}  // namespace ivy
