#include "checkpoint/formats/torch_dcp/archive_writer.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "checkpoint/formats/torch_dcp/torch_archive.hpp"

namespace tsr {

std::string storage_entry(size_t storage) { return fmt::format("data/{}", storage); }

void put_tensor(pickle::PickleWriter& out, DType dtype, const Dims& shape, size_t storage) {
    const auto numbers = [&](auto number_of) {
        out.mark();
        for (int d = 0; d < shape.ndim(); ++d) out.integer(number_of(d));
        out.tuple();
    };
    std::array<int64_t, max_ndim> strides{};
    int64_t stride = 1;
    for (int d = shape.ndim() - 1; d >= 0; --d) {
        strides[static_cast<size_t>(d)] = stride;
        stride *= std::max<int64_t>(shape[d], 1);
    }
    const std::string_view type = torch_storage_name(dtype);
    out.global("torch._utils", type.empty() ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
    out.mark();
    out.mark();
    out.text("storage");
    type.empty() ? out.global("torch.storage", "UntypedStorage") : out.global("torch", type);
    out.text(std::to_string(storage));
    out.text("cpu");
    out.integer(type.empty() ? shape.product() * static_cast<int64_t>(size_of(dtype)) : shape.product());
    out.tuple();
    out.persistent();
    out.integer(0);
    numbers([&](int d) { return shape[d]; });
    numbers([&](int d) { return strides[static_cast<size_t>(d)]; });
    out.boolean(false);
    out.global("collections", "OrderedDict");
    out.empty_tuple();
    out.reduce();
    if (type.empty()) out.global("torch", torch_name(dtype));
    out.tuple();
    out.reduce();
}

void begin_archive(ZipWriter& zip, std::string_view object) {
    zip.add("data.pkl", object);
    zip.add("byteorder", "little");
}

void end_archive(ZipWriter& zip) { zip.add("version", "3\n"); }

}  // namespace tsr
