// Containers whose allocations are counted, so that a test can see that encoding does without them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace ivy {

inline std::atomic<std::uint64_t> num_allocations{0};

template <class T>
struct CountedAllocator {
    using value_type = T;

    CountedAllocator() = default;
    template <class U>
    CountedAllocator(const CountedAllocator<U>&) noexcept {}

    T* allocate(std::size_t count) {
        num_allocations.fetch_add(1, std::memory_order_relaxed);
        return static_cast<T*>(::operator new(count * sizeof(T)));
    }
    void deallocate(T* data, std::size_t) noexcept { ::operator delete(data); }

    bool operator==(const CountedAllocator&) const { return true; }
    bool operator!=(const CountedAllocator&) const { return false; }
};

template <class T>
using Vector = std::vector<T, CountedAllocator<T>>;

}  // namespace ivy
