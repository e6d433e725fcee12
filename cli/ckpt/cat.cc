// `tessera ckpt cat`: the contents of one tensor or value. Tensors of any size are read batch by batch.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <vector>

#include "checkpoint/model/batches.hpp"
#include "ckpt/command.hpp"
#include "ckpt/elements.hpp"
#include "ckpt/print.hpp"
#include "ckpt/progress.hpp"
#include "ckpt/slice.hpp"

namespace tsr::cli {

namespace {

constexpr int64_t shown_first = 8;

struct Arguments {
    std::string name;
    std::optional<std::string> slice;
    bool raw = false;
};

void write_out(const std::byte* data, size_t size) {
    if (std::fwrite(data, 1, size, stdout) != size) throw os_error("cannot write to standard output", errno);
}

// The error for an unknown name, with similar names.
Error no_such_name(const Checkpoint& checkpoint, const std::string& name) {
    std::string like;
    int found = 0;
    const auto look = [&](const std::string& other) {
        if (found == 3 || other.find(name) == std::string::npos) return;
        like += fmt::format("{}'{}'", found++ > 0 ? ", " : "; similar names: ", other);
    };
    for (const std::string& other : checkpoint.names()) look(other);
    for (const auto& [other, value] : checkpoint.manifest().values) look(other);
    return Error(Code::invalid_argument,
                 fmt::format("{} has no tensor or value '{}'{}; run `tessera ckpt tree` to list all", checkpoint.path(),
                             name, like));
}

// Reads `box` of a tensor in row-major order; visit(elements before, data, count).
void stream(const Checkpoint& checkpoint, const std::string& name, DType dtype, const Box& box,
            const std::function<void(int64_t first, const std::byte* data, int64_t count)>& visit) {
    const TypedBox all{box, dtype};
    const AlignedBuffer memory(static_cast<size_t>(largest_batch(std::span(&all, 1), default_batch_bytes)));
    Progress progress("cat", all.size_bytes());
    for_each_batch(std::span(&all, 1), default_batch_bytes, [&](std::span<const BatchPart> parts, int64_t bytes) {
        std::vector<ReadPart> reads;
        for (const BatchPart& part : parts) reads.push_back({name, part.box, memory.data() + part.begin});
        checkpoint.read(reads);
        visit(parts.front().first, memory.data(), bytes / static_cast<int64_t>(size_of(dtype)));
        progress.add(bytes);
    });
}

// Writes elements one by one, as a nested list or as lines; the index of an element tells where rows end.
class SlicePrinter {
   public:
    SlicePrinter(const Slice& slice, DType dtype, Output output) : slice_(slice), dtype_(dtype), output_(output) {
        int64_t run = 1;
        const Dims shape = slice.shape();
        for (int d = shape.ndim() - 1; d >= 0; --d) runs_.insert(runs_.begin(), run *= shape[d]);
    }
    void add(int64_t first, const std::byte* data, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
            const std::byte* at = data + static_cast<size_t>(i) * size_of(dtype_);
            if (output_ == Output::json) {
                json_element(first + i, at);
            } else {
                text_element(first + i, at);
            }
        }
    }

   private:
    void json_element(int64_t index, const std::byte* at) const {
        if (index > 0) fmt::print(",");
        for (const int64_t run : runs_) {
            if (index % run == 0) fmt::print("[");
        }
        fmt::print("{}", element_json(at, dtype_).dump());
        for (const int64_t run : runs_) {
            if ((index + 1) % run == 0) fmt::print("]");
        }
    }
    // "[3, :]  1 2 3": one line per row of the last kept dimension.
    void text_element(int64_t index, const std::byte* at) const {
        const int64_t row = runs_.empty() ? 1 : runs_.back();
        if (index % row == 0) fmt::print("{}  ", place_of(index));
        fmt::print("{}{}", element_text(at, dtype_), (index + 1) % row == 0 ? "\n" : " ");
    }
    std::string place_of(int64_t index) const {
        Dims place = slice_.box.offsets;
        for (size_t k = 0; k + 1 < slice_.kept.size(); ++k) place[slice_.kept[k]] += index % runs_[k] / runs_[k + 1];
        std::string text = "[";
        for (int d = 0; d < place.ndim(); ++d) {
            if (d > 0) text += ", ";
            const bool is_row = !slice_.kept.empty() && d == slice_.kept.back();
            const int64_t end = place[d] + slice_.box.sizes[d];
            text += is_row ? fmt::format("{}:{}", place[d], end) : std::to_string(place[d]);
        }
        return text + "]";
    }

    const Slice& slice_;
    DType dtype_;
    Output output_;
    std::vector<int64_t> runs_;  // elements of each kept dimension and those within it
};

void show_slice(const Checkpoint& checkpoint, const std::string& name, const SavedTensor& tensor, const Slice& slice,
                Json head, Output output) {
    SlicePrinter printer(slice, tensor.dtype, output);
    if (output == Output::text) {
        stream(checkpoint, name, tensor.dtype, slice.box,
               [&](int64_t first, const std::byte* data, int64_t count) { printer.add(first, data, count); });
        return;
    }
    // The document is written element by element, as they may not fit into memory.
    head.set("slice", dims_json(slice.shape()));
    std::string text = head.dump();
    text.pop_back();
    fmt::print("{},\"values\":", text);
    if (slice.box.empty()) fmt::print("[]");
    stream(checkpoint, name, tensor.dtype, slice.box,
           [&](int64_t first, const std::byte* data, int64_t count) { printer.add(first, data, count); });
    fmt::print("}}\n");
}

void show_statistics(const Checkpoint& checkpoint, const std::string& name, const SavedTensor& tensor, Json head,
                     Output output) {
    Statistics all(tensor.dtype);
    std::vector<std::byte> begin;
    stream(checkpoint, name, tensor.dtype, Box::whole(tensor.shape),
           [&](int64_t first, const std::byte* data, int64_t count) {
               const auto kept = static_cast<size_t>(std::min(count, shown_first)) * size_of(tensor.dtype);
               if (first == 0) begin.assign(data, data + kept);
               all.add(data, count);
           });
    const size_t item = size_of(tensor.dtype);
    if (output == Output::json) {
        head.set("count", all.count());
        head.set("nan", all.nan());
        head.set("infinite", all.infinite());
        head.set("zero", all.zero());
        head.set("min", all.min());
        head.set("max", all.max());
        head.set("mean", all.mean());
        head.set("norm", all.norm());
        Json::Array first;
        for (size_t at = 0; at < begin.size(); at += item) {
            first.push_back(element_json(begin.data() + at, tensor.dtype));
        }
        head.set("first", Json(std::move(first)));
        print_json(head);
        return;
    }
    const auto line = [](const char* what, const std::string& value) { fmt::print("{:<8}{}\n", what, value); };
    const auto number = [](const Json& value) {
        return value.is(Json::Kind::number) ? number_text(value.as_double()) : value.dump();
    };
    line("name", printable(name));
    const std::string& saved_name = checkpoint.manifest().saved_name(name);
    if (saved_name != name) line("tied to", printable(saved_name));
    line("dtype", std::string(name_of(tensor.dtype)));
    line("shape", fmt::format("{}, {} elements, {}", tensor.shape.str(), all.count(), size_text(tensor.size_bytes())));
    if (all.finite() > 0) {
        line("min", number(all.min()));
        line("max", number(all.max()));
        line("mean", number(all.mean()));
        line("norm", number(all.norm()));
    }
    line("zero", std::to_string(all.zero()));
    if (!is_integer(tensor.dtype)) {
        line("NaN", std::to_string(all.nan()));
        line("Inf", std::to_string(all.infinite()));
    }
    std::string first;
    for (size_t at = 0; at < begin.size(); at += item) {
        if (at > 0) first += ' ';
        first += element_text(begin.data() + at, tensor.dtype);
    }
    if (all.count() > shown_first) first += " ...";
    line("first", first);
}

int cat(const std::string& path, const Arguments& arguments, Output output) {
    const auto checkpoint = Checkpoint::open(path);
    const Manifest& manifest = checkpoint->manifest();
    const SavedTensor* tensor = manifest.find(arguments.name);
    Json head;
    head.set("path", checkpoint->path());
    head.set("name", arguments.name);
    if (tensor == nullptr) {
        const auto value = manifest.values.find(arguments.name);
        if (value == manifest.values.end()) throw no_such_name(*checkpoint, arguments.name);
        if (arguments.raw || arguments.slice) {
            throw Error(Code::invalid_argument, fmt::format("'{}' is a value, not a tensor; --{} does not apply",
                                                            arguments.name, arguments.raw ? "raw" : "slice"));
        }
        head.set("value", value->second);
        if (output == Output::json) {
            print_json(head);
        } else {
            fmt::print("{}\n", printable(value->second.dump()));
        }
        return exit_sound;
    }
    const std::string& saved_name = manifest.saved_name(arguments.name);
    if (saved_name != arguments.name) head.set("alias_of", saved_name);
    head.set("dtype", name_of(tensor->dtype));
    head.set("shape", dims_json(tensor->shape));
    head.set("size_bytes", tensor->size_bytes());
    const Slice slice = arguments.slice ? Slice::parse(*arguments.slice, tensor->shape) : Slice::whole(tensor->shape);
    if (arguments.raw) {
        if (output == Output::json) throw Error(Code::invalid_argument, "--raw cannot be used with --json");
        if (::isatty(STDOUT_FILENO) == 1) {
            throw Error(Code::invalid_argument, "--raw writes binary data; redirect standard output to a file or pipe");
        }
        stream(*checkpoint, arguments.name, tensor->dtype, slice.box,
               [&](int64_t, const std::byte* data, int64_t count) {
                   write_out(data, static_cast<size_t>(count) * size_of(tensor->dtype));
               });
        if (std::fflush(stdout) != 0) throw os_error("cannot write to standard output", errno);
    } else if (arguments.slice) {
        show_slice(*checkpoint, arguments.name, *tensor, slice, std::move(head), output);
    } else {
        show_statistics(*checkpoint, arguments.name, *tensor, std::move(head), output);
    }
    return exit_sound;
}

}  // namespace

void add_cat(Command& ckpt) {
    const auto arguments = std::make_shared<Arguments>();
    Command command =
        add_command(ckpt, "cat", "Show one tensor: statistics and the first elements, or a slice; or show one value",
                    checkpoint_path_what,
                    [arguments](const std::string& path, Output output) { return cat(path, *arguments, output); });
    command.add_option("name", arguments->name, "Name of the tensor or value, as shown by `tree`").required();
    command.add_option("--slice", arguments->slice, "Print these elements, in NumPy's notation: \"0:2, :, -1\"");
    command.add_flag("--raw", arguments->raw, "Write only the bytes: row-major, little endian");
}

}  // namespace tsr::cli
