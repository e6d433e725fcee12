// A queue that keeps its memory: it stops allocating once it has reached its maximum length.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace tsr {

template <class T>
class Ring {
   public:
    [[nodiscard]] bool empty() const { return size_ == 0; }
    [[nodiscard]] T& front() { return slots_[first_]; }
    void push_back(T value) {
        if (size_ == slots_.size()) grow();
        slots_[(first_ + size_++) % slots_.size()] = std::move(value);
    }
    [[nodiscard]] T pop_front() {
        T value = std::exchange(slots_[first_], T{});
        first_ = (first_ + 1) % slots_.size();
        --size_;
        return value;
    }

   private:
    void grow() {
        std::vector<T> larger(slots_.empty() ? 8 : 2 * slots_.size());
        for (size_t i = 0; i < size_; ++i) larger[i] = std::move(slots_[(first_ + i) % slots_.size()]);
        slots_ = std::move(larger);
        first_ = 0;
    }

    std::vector<T> slots_;
    size_t first_ = 0;
    size_t size_ = 0;
};

}  // namespace tsr
