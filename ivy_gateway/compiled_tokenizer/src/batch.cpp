#include "batch.hpp"

#include <algorithm>
#include <cstring>

namespace ivy {
namespace {

constexpr std::size_t kCharactersPerThread = 4096;  // about 50 us of work; waking a thread takes about 10
constexpr std::size_t kMaxKeptTokens = 1U << 20;     // of one scratch, between calls
constexpr std::size_t kMaxKept = 64;                 // batches, and scratches

template <class Unit>
bool is_unicode([[maybe_unused]] const Unit* text, [[maybe_unused]] std::size_t size) {
    bool surrogate = false;
    if constexpr (sizeof(Unit) > 1)
        for (std::size_t i = 0; i < size; ++i) surrogate |= is_surrogate(text[i]);
    return !surrogate;
}

std::int32_t* copy(const std::vector<std::int32_t>& from, std::int32_t* to) {
    return std::copy(from.begin(), from.end(), to);
}

template <class T>
std::unique_ptr<T> take_last(Vector<std::unique_ptr<T>>& from) {
    std::unique_ptr<T> last = std::move(from.back());
    from.pop_back();
    return last;
}

}  // namespace

void Batch::run() {
    next_ = 0;
    encoder_.pool_.run(*this, static_cast<unsigned>(num_helpers()));
}

std::size_t Batch::num_helpers() const {
    std::size_t characters = 0;
    for (const Item& item : items) characters += item.text.size;
    const std::size_t parts = std::min(items.size(), characters / kCharactersPerThread);
    return parts > 0 ? parts - 1 : 0;
}

void Batch::work() noexcept {
    std::unique_ptr<Scratch> scratch;
    for (std::size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < items.size();) {
        if (!scratch) scratch = encoder_.lend_scratch();
        encode(items[i], *scratch);
    }
    if (!scratch) return;
    const std::lock_guard lock(mutex_);
    scratches_.push_back(std::move(scratch));
}

void Batch::encode(Item& item, Scratch& scratch) const {
    const Frame& frame = *item.frame;
    item.owner = &scratch;
    item.first = scratch.tokens.size();
    item.count = 0;
    if (!visit(item.text, [](const auto* units, std::size_t size) { return is_unicode(units, size); })) {
        item.state = Item::State::NotUnicode;
        return;
    }
    const bool stops_early = frame.room != Model::kNoLimit && !frame.keeps_end;
    if (!encoder_.model().encode(item.text, stops_early ? frame.room + 1 : Model::kNoLimit, scratch)) {
        item.state = Item::State::NotEncoded;
        return;
    }
    const std::size_t found = scratch.tokens.size() - item.first;
    item.count = std::min(found, frame.room);
    item.state = found > item.count ? Item::State::Cut : Item::State::Whole;
    if (frame.keeps_end) item.first += found - item.count;
}

void Batch::write(std::int32_t* ids, std::int32_t* segments) const {
    for (const Item& item : items) {
        const Frame& frame = *item.frame;
        ids = copy(frame.prefix.ids, ids);
        ids = std::copy_n(item.owner->tokens.data() + item.first, item.count, ids);
        ids = copy(frame.suffix.ids, ids);
        if (segments == nullptr) continue;
        segments = copy(frame.prefix.segments, segments);
        segments = std::fill_n(segments, item.count, frame.text_segment);
        segments = copy(frame.suffix.segments, segments);
    }
}

std::unique_ptr<Batch> BatchEncoder::lend_batch() {
    const std::lock_guard lock(mutex_);
    return batches_.empty() ? std::unique_ptr<Batch>(new Batch(*this)) : take_last(batches_);
}

std::unique_ptr<Scratch> BatchEncoder::lend_scratch() {
    {
        const std::lock_guard lock(mutex_);
        if (!scratches_.empty()) return take_last(scratches_);
    }
    return std::make_unique<Scratch>(model_->num_cached_words());
}

void BatchEncoder::give_back(std::unique_ptr<Batch> batch) {
    batch->items.clear();
    const std::lock_guard lock(mutex_);
    for (auto& scratch : batch->scratches_) {
        scratch->tokens.clear();
        if (scratches_.size() < kMaxKept && scratch->tokens.capacity() <= kMaxKeptTokens)
            scratches_.push_back(std::move(scratch));
    }
    batch->scratches_.clear();
    if (batches_.size() < kMaxKept) batches_.push_back(std::move(batch));
}

}  // namespace ivy
