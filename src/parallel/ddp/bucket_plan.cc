#include "parallel/ddp/bucket_plan.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

namespace tsr {

namespace {

constexpr size_t padded(size_t size) { return (size + slot_alignment - 1) / slot_alignment * slot_alignment; }

// Labels are kept by flight records that may outlive the DDP object, so they are constants.
struct Label {
    std::array<char, 12> text{};
    size_t size = 0;
};

consteval auto make_labels() {
    std::array<Label, 1000> labels{};
    for (size_t i = 0; i < labels.size(); ++i) {
        Label& label = labels[i];
        for (const char c : std::string_view("bucket ")) label.text[label.size++] = c;
        if (i >= 100) label.text[label.size++] = static_cast<char>('0' + i / 100);
        if (i >= 10) label.text[label.size++] = static_cast<char>('0' + i / 10 % 10);
        label.text[label.size++] = static_cast<char>('0' + i % 10);
    }
    return labels;
}

constexpr auto labels = make_labels();

}  // namespace

std::string_view bucket_label(size_t index) {
    if (index >= labels.size()) return "a bucket beyond 999";
    return {labels[index].text.data(), labels[index].size};
}

std::vector<Bucket> plan_buckets(std::span<const Tensor> params, BucketLimits limits) {
    std::vector<Bucket> done;
    std::map<DType, Bucket> open;
    std::map<DType, size_t> closed_count;
    for (size_t i = params.size(); i-- > 0;) {
        const Tensor& param = params[i];
        Bucket& bucket = open[param.dtype];
        bucket.dtype = param.dtype;
        bucket.slots.push_back({i, bucket.size});
        bucket.size += padded(param.size_bytes());
        const size_t limit = closed_count[param.dtype] == 0 ? limits.first_bytes : limits.bytes;
        if (bucket.size < limit) continue;
        ++closed_count[param.dtype];
        done.push_back(std::move(bucket));
        open.erase(param.dtype);
    }
    for (auto& [dtype, bucket] : open) done.push_back(std::move(bucket));
    // Those left open at the end were completed by their own last gradient, before others may have been closed.
    std::sort(done.begin(), done.end(),
              [](const Bucket& a, const Bucket& b) { return a.slots.back().param > b.slots.back().param; });
    return done;
}

}  // namespace tsr
