#include "viterbi.hpp"

namespace ivy {
namespace {

constexpr double kUnreached = -std::numeric_limits<double>::infinity();

template <class T>
void shrink(Vector<T>& vector, std::size_t max_kept) {
    vector.clear();
    if (vector.capacity() > max_kept) Vector<T>().swap(vector);
}

}  // namespace

void ShortWord::encode(const UnigramModel& model, const Code* codes, std::size_t size, Vector<std::int32_t>& out) {
    Node* const nodes = nodes_.data();
    nodes[0] = {0.0, 0, 0};
    for (std::size_t i = 1; i <= size; ++i) nodes[i].score = kUnreached;
    for (std::size_t start = 0; start < size; ++start) {
        const double before = nodes[start].score;
        model.for_each_piece(codes + start, [&](std::int32_t length, std::int32_t token, double score) {
            Node& end = nodes[start + static_cast<std::size_t>(length)];
            const double sum = score + before;
            if (sum > end.score) end = {sum, token, length};
        });
    }
    const std::size_t first = out.size();
    std::int32_t next = -1;
    for (std::size_t end = size; end > 0; end -= static_cast<std::size_t>(nodes[end].length)) {
        const std::int32_t token = nodes[end].token;
        if (token != model.unknown_token || next != token) out.push_back(token);
        next = token;
    }
    std::reverse(out.begin() + static_cast<std::ptrdiff_t>(first), out.end());
}

void LongWord::append(const UnigramModel& model, const Code* codes, std::size_t size, Vector<std::int32_t>& out) {
    if (!open()) begin(model);
    codes_.insert(codes_.end(), codes, codes + size);
    if (codes_.size() < model.max_piece) return;
    advance(model, codes_.size() - model.max_piece);
    if (start_ < next_attempt_) return;
    if (const std::size_t agreed = common_ancestor(model.max_piece)) {
        emit(agreed, model, out);
        forget(agreed);
    }
    next_attempt_ = std::max(kMinAttempt, 2 * start_);
}

void LongWord::finish(const UnigramModel& model, Vector<std::int32_t>& out) {
    const std::size_t size = codes_.size();
    codes_.push_back(0);
    advance(model, size);
    emit(size, model, out);
    drop();
}

void LongWord::drop() {
    shrink(codes_, kMaxKept);
    shrink(tokens_, kMaxKept);
    shrink(lengths_, kMaxKept);
    shrink(path_, kMaxKept);
    shrink(marked_, kMaxKept);
}

void LongWord::begin(const UnigramModel& model) {
    std::size_t ring = 2;
    while (ring < model.max_piece + 2) ring *= 2;
    scores_.assign(ring, kUnreached);
    scores_[0] = 0.0;
    origin_ = start_ = 0;
    next_attempt_ = kMinAttempt;
    after_unknown_ = false;
    tokens_.resize(1);
    lengths_.resize(1);
}

// Looks up the pieces at all positions below `end`.
void LongWord::advance(const UnigramModel& model, std::size_t end) {
    tokens_.resize(codes_.size() + 1);
    lengths_.resize(codes_.size() + 1);
    for (; start_ < end; ++start_) {
        const double before = score(start_);
        score(start_) = kUnreached;  // its place in the ring is the one of a position not yet reached
        model.for_each_piece(codes_.data() + start_, [&](std::int32_t length, std::int32_t token, double piece) {
            const std::size_t target = start_ + static_cast<std::size_t>(length);
            const double sum = piece + before;
            if (sum <= score(target)) return;
            score(target) = sum;
            tokens_[target] = token;
            lengths_[target] = static_cast<std::uint16_t>(length);
        });
    }
}

// The last position that the best paths to all of the last `reach` final positions have in common.
std::size_t LongWord::common_ancestor(std::size_t reach) {
    const std::size_t lowest = start_ - std::min(start_, reach - 1);
    marked_.assign(start_ + 1, 0);
    std::size_t num_marked = start_ - lowest + 1;
    for (std::size_t i = lowest; i <= start_; ++i) marked_[i] = 1;
    std::size_t position = start_;
    for (; num_marked > 1; --position) {
        if (!marked_[position]) continue;
        marked_[position] = 0;
        std::uint8_t& parent = marked_[position - lengths_[position]];
        if (parent) --num_marked;
        parent = 1;
    }
    while (!marked_[position]) --position;
    return position;
}

// The tokens of the best path from the origin to `end`.
void LongWord::emit(std::size_t end, const UnigramModel& model, Vector<std::int32_t>& out) {
    path_.clear();
    for (std::size_t i = end; i > 0; i -= lengths_[i]) path_.push_back(lengths_[i]);
    std::size_t position = 0;
    for (std::size_t i = path_.size(); i-- > 0;) {
        position += path_[i];
        const std::int32_t token = tokens_[position];
        if (token != model.unknown_token || !after_unknown_) out.push_back(token);
        after_unknown_ = token == model.unknown_token;
    }
}

void LongWord::forget(std::size_t count) {
    const auto offset = static_cast<std::ptrdiff_t>(count);
    codes_.erase(codes_.begin(), codes_.begin() + offset);
    tokens_.erase(tokens_.begin(), tokens_.begin() + offset);
    lengths_.erase(lengths_.begin(), lengths_.begin() + offset);
    origin_ += count;
    start_ -= count;
}

}  // namespace ivy
