#include "parallel/ddp/bucket_plan.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <utility>

#include "base/round_up.hpp"

namespace tsr {

namespace {

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

std::vector<size_t> reverse_order(size_t n) {
    std::vector<size_t> order(n);
    for (size_t i = 0; i < n; ++i) order[i] = n - 1 - i;
    return order;
}

std::vector<Bucket> plan_buckets(std::span<const Tensor> params, BucketLimits limits, std::span<const size_t> order) {
    struct Open {
        Bucket bucket;
        size_t last = 0;  // place in `order` of the last gradient
    };
    using Key = std::tuple<DType, DeviceType, int>;
    std::vector<Open> done;
    std::map<Key, Open> open;
    std::map<Key, size_t> closed_count;
    for (size_t place = 0; place < order.size(); ++place) {
        const size_t i = order[place];
        const Tensor& param = params[i];
        const Key key{param.dtype, param.device.type, param.device.index};
        Open& current = open[key];
        Bucket& bucket = current.bucket;
        bucket.dtype = param.dtype;
        bucket.slots.push_back({i, bucket.size});
        bucket.size += round_up(param.size_bytes(), slot_alignment);
        current.last = place;
        const size_t limit = closed_count[key] == 0 ? limits.first_bytes : limits.bytes;
        if (bucket.size < limit) continue;
        ++closed_count[key];
        done.push_back(std::move(current));
        open.erase(key);
    }
    for (auto& [key, current] : open) done.push_back(std::move(current));
    // A bucket left open at the end was complete with its last gradient, possibly before others were closed.
    std::sort(done.begin(), done.end(), [](const Open& a, const Open& b) { return a.last < b.last; });
    std::vector<Bucket> buckets;
    buckets.reserve(done.size());
    for (Open& one : done) buckets.push_back(std::move(one.bucket));
    return buckets;
}

}  // namespace tsr
