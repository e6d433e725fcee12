// Layouts: who holds which box of a tensor.
#include <algorithm>
#include <stdexcept>

#include "jni.hpp"

namespace tsr::jni {

namespace {

// `placements`: kind and dimension of each mesh dimension, in turn.
jlong layout_create(JNIEnv* env, jclass, jlongArray shape, jintArray mesh_sizes, jintArray placements) {
    return shim(env, [&] {
        const std::vector<int64_t> dims = longs(env, shape);
        const std::vector<int32_t> sizes = ints(env, mesh_sizes);
        const std::vector<int32_t> pairs = ints(env, placements);
        if (pairs.size() != 2 * sizes.size()) throw std::logic_error("one placement a mesh dimension");
        std::vector<tsr_placement> list;
        for (size_t i = 0; i < pairs.size(); i += 2) list.push_back({pairs[i], pairs[i + 1]});
        tsr_layout* layout = nullptr;
        check(env, tsr_layout_create(dims.data(), static_cast<int32_t>(dims.size()), sizes.data(), list.data(),
                                     static_cast<int32_t>(sizes.size()), &layout));
        return as_long(layout);
    });
}

// `numbers`: ndim offsets and ndim sizes of each of `total` boxes, in turn.
std::vector<tsr_box> boxes_of(const std::vector<int64_t>& numbers, size_t total, size_t ndim) {
    if (ndim > TSR_MAX_NDIM) throw std::logic_error("more than 8 dimensions");  // tsr_box could not hold them
    if (numbers.size() != total * 2 * ndim) throw std::logic_error("boxes and counts differ");
    std::vector<tsr_box> list(total);
    for (size_t i = 0; i < total; ++i) {
        const int64_t* box = numbers.data() + i * 2 * ndim;
        std::copy_n(box, ndim, list[i].offsets);
        std::copy_n(box + ndim, ndim, list[i].sizes);
    }
    return list;
}

// `counts`: boxes of each rank.
jlong layout_from_boxes(JNIEnv* env, jclass, jlongArray shape, jlongArray boxes, jintArray counts) {
    return shim(env, [&] {
        const std::vector<int64_t> dims = longs(env, shape);
        const std::vector<int32_t> per_rank = ints(env, counts);
        const size_t ndim = dims.size();
        size_t total = 0;
        for (const int32_t count : per_rank) total += static_cast<size_t>(count);
        const std::vector<tsr_box> list = boxes_of(longs(env, boxes), total, ndim);
        tsr_layout* layout = nullptr;
        check(env, tsr_layout_from_boxes(dims.data(), static_cast<int32_t>(ndim), list.data(), per_rank.data(),
                                         static_cast<int32_t>(per_rank.size()), &layout));
        return as_long(layout);
    });
}

// `count` boxes of this rank.
jlong layout_gather(JNIEnv* env, jclass, jlong comm, jlongArray shape, jlongArray boxes, jint count) {
    return shim(env, [&] {
        const std::vector<int64_t> dims = longs(env, shape);
        const std::vector<tsr_box> list = boxes_of(longs(env, boxes), static_cast<size_t>(count), dims.size());
        tsr_layout* layout = nullptr;
        blocking(env, [&] {
            return tsr_layout_gather(as<tsr_comm>(comm), dims.data(), static_cast<int32_t>(dims.size()), list.data(),
                                     count, &layout);
        });
        return as_long(layout);
    });
}

// 8 offsets, 8 sizes
jlongArray layout_box(JNIEnv* env, jclass, jlong layout, jint rank, jint index) {
    return shim(env, [&] {
        tsr_box box{};
        check(env, tsr_layout_box(as<tsr_layout>(layout), rank, index, &box));
        int64_t numbers[2 * TSR_MAX_NDIM];
        std::copy_n(box.offsets, TSR_MAX_NDIM, numbers);
        std::copy_n(box.sizes, TSR_MAX_NDIM, numbers + TSR_MAX_NDIM);
        return longs_of(env, numbers, 2 * TSR_MAX_NDIM);
    });
}

}  // namespace

Methods layout_methods() {
    return {method<layout_create>("layoutCreate"), method<layout_from_boxes>("layoutFromBoxes"),
            method<layout_gather>("layoutGather"), method<layout_box>("layoutBox")};
}

}  // namespace tsr::jni
