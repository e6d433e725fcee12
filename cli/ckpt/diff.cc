// `tessera ckpt diff`: compares two checkpoints of any world sizes and layouts. Both are read batch by batch, so memory
// is bounded.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <vector>

#include "checkpoint/model/batches.hpp"
#include "ckpt/command.hpp"
#include "ckpt/elements.hpp"
#include "ckpt/print.hpp"
#include "ckpt/progress.hpp"

namespace tsr::cli {

namespace {

struct Tolerance {
    double absolute = 0;
    double relative = 0;  // of the second checkpoint's element
};

// The difference of two tensors of the same dtype and shape, processed piece by piece.
class Difference {
   public:
    void compare(const std::byte* a, const std::byte* b, DType dtype, int64_t first, int64_t count,
                 const Tolerance& tolerance);

    [[nodiscard]] int64_t differing() const { return differing_; }
    [[nodiscard]] double max_abs() const { return max_abs_; }
    [[nodiscard]] double mean_abs(int64_t elements) const { return sum_abs_ / static_cast<double>(elements); }
    [[nodiscard]] double max_rel() const { return max_rel_; }
    [[nodiscard]] int64_t where() const { return where_; }  // row-major index of the largest difference
    // The elements at that index.
    [[nodiscard]] const std::byte* a() const { return a_.data(); }
    [[nodiscard]] const std::byte* b() const { return b_.data(); }

   private:
    int64_t differing_ = 0;
    double max_abs_ = -1;  // NaN against a number counts as infinite
    double sum_abs_ = 0;
    double max_rel_ = 0;
    int64_t where_ = 0;
    std::array<std::byte, 16> a_{};  // the largest element is a c128
    std::array<std::byte, 16> b_{};
};

void Difference::compare(const std::byte* a, const std::byte* b, DType dtype, int64_t first, int64_t count,
                         const Tolerance& tolerance) {
    const size_t item = size_of(dtype);
    if (std::memcmp(a, b, static_cast<size_t>(count) * item) == 0) return;
    std::array<double, elements_at_once> of_a;  // NOLINT(cppcoreguidelines-pro-type-member-init): filled below
    std::array<double, elements_at_once> of_b;  // NOLINT(cppcoreguidelines-pro-type-member-init)
    for (int64_t begin = 0; begin < count; begin += static_cast<int64_t>(elements_at_once)) {
        const auto n = static_cast<size_t>(std::min(count - begin, static_cast<int64_t>(elements_at_once)));
        const size_t at = static_cast<size_t>(begin) * item;
        if (std::memcmp(a + at, b + at, n * item) == 0) continue;
        widen(a + at, dtype, std::span(of_a).first(n));
        widen(b + at, dtype, std::span(of_b).first(n));
        for (size_t i = 0; i < n; ++i) {
            const bool is_plain = is_floating(dtype);
            double gap =
                is_plain ? std::fabs(of_a[i] - of_b[i]) : gap_between(a + at + i * item, b + at + i * item, dtype);
            if (of_a[i] == of_b[i] && gap == 0) continue;
            if (std::isnan(of_a[i]) && std::isnan(of_b[i])) continue;
            if (is_plain && of_a[i] == of_b[i] && std::isinf(of_a[i])) continue;
            if (std::isnan(gap)) gap = std::numeric_limits<double>::infinity();
            sum_abs_ += gap;
            if (std::isfinite(gap) && gap <= tolerance.absolute + tolerance.relative * std::fabs(of_b[i])) continue;
            ++differing_;
            const double size = std::max(std::fabs(of_a[i]), std::fabs(of_b[i]));
            const double ratio = std::isfinite(gap) ? gap / size : std::numeric_limits<double>::infinity();
            max_rel_ = std::max(max_rel_, ratio);
            if (gap > max_abs_) {
                max_abs_ = gap;
                where_ = first + begin + static_cast<int64_t>(i);
                std::memcpy(a_.data(), a + at + i * item, item);
                std::memcpy(b_.data(), b + at + i * item, item);
            }
        }
    }
}

Dims place_of(int64_t element, const Dims& shape) {
    Dims place = shape;
    for (int d = shape.ndim() - 1; d >= 0; --d) {
        place[d] = element % shape[d];
        element /= shape[d];
    }
    return place;
}

std::string kind_text(const SavedTensor& tensor) {
    return fmt::format("{} {}", name_of(tensor.dtype), tensor.shape.str());
}

Json kind_json(const SavedTensor& tensor) {
    Json json;
    json.set("dtype", name_of(tensor.dtype));
    json.set("shape", dims_json(tensor.shape));
    return json;
}

// Collects differences and prints them: text immediately, JSON at the end.
class Report {
   public:
    Report(const Checkpoint& a, const Checkpoint& b, Output output) : output_(output) {
        json_.set("a", a.path());
        json_.set("b", b.path());
    }

    void only_in(const char* which, const std::string& name) {
        if (output_ == Output::text) fmt::print("{} only: {}\n", which, printable(name));
        (*which == 'A' ? only_in_a_ : only_in_b_).emplace_back(name);
    }
    void kinds(const std::string& name, const SavedTensor& a, const SavedTensor& b) {
        if (output_ == Output::text) {
            fmt::print("{}: {} in A, {} in B\n", printable(name), kind_text(a), kind_text(b));
        }
        Json one;
        one.set("name", name);
        one.set("a", kind_json(a));
        one.set("b", kind_json(b));
        kinds_.push_back(std::move(one));
    }
    void unreadable(const std::string& name, const std::string* in_a, const std::string* in_b) {
        if (output_ == Output::text) {
            const std::string& why = in_a != nullptr ? *in_a : *in_b;
            const char* where = in_a == nullptr ? "B" : in_b == nullptr ? "A" : "A and B";
            fmt::print("{}: not compared, {} cannot be read: {}\n", printable(name), where, printable(why));
        }
        Json one;
        one.set("name", name);
        one.set("a", in_a != nullptr ? Json(*in_a) : Json());
        one.set("b", in_b != nullptr ? Json(*in_b) : Json());
        unreadable_.push_back(std::move(one));
    }
    void value(const std::string& name, const Json& a, const Json& b) {
        if (output_ == Output::text) {
            fmt::print("{}: {} in A, {} in B\n", printable(name), value_text(a), value_text(b));
        }
        Json one;
        one.set("name", name);
        one.set("a", a);
        one.set("b", b);
        values_.push_back(std::move(one));
    }
    void elements(const std::string& name, const SavedTensor& tensor, const Difference& difference) {
        const int64_t count = tensor.shape.product();
        const Dims where = place_of(difference.where(), tensor.shape);
        if (output_ == Output::text) {
            fmt::print("{}  {}: {} of {} differ, max abs {} at {} ({} in A, {} in B), mean abs {}, max rel {}\n",
                       printable(name), kind_text(tensor), difference.differing(), count,
                       number_text(difference.max_abs()), where.str(), exact_text(difference.a(), tensor.dtype),
                       exact_text(difference.b(), tensor.dtype), number_text(difference.mean_abs(count)),
                       number_text(difference.max_rel()));
        }
        Json one = kind_json(tensor);
        one.object().insert(one.object().begin(), {"name", name});
        one.set("differing", difference.differing());
        one.set("count", count);
        one.set("max_abs", double_value(difference.max_abs()));
        one.set("where", dims_json(where));
        one.set("a", element_json(difference.a(), tensor.dtype));
        one.set("b", element_json(difference.b(), tensor.dtype));
        one.set("mean_abs", double_value(difference.mean_abs(count)));
        one.set("max_rel", double_value(difference.max_rel()));
        elements_.push_back(std::move(one));
    }

    // The exit code.
    int finish(size_t compared, int64_t bytes) {
        const bool same =
            only_in_a_.empty() && only_in_b_.empty() && kinds_.empty() && elements_.empty() && values_.empty();
        if (output_ == Output::json) {
            json_.set("same", same && !unreadable_.empty() ? Json() : Json(same));
            json_.set("compared", static_cast<int64_t>(compared));
            json_.set("only_in_a", Json(std::move(only_in_a_)));
            json_.set("only_in_b", Json(std::move(only_in_b_)));
            json_.set("kinds", Json(std::move(kinds_)));
            json_.set("tensors", Json(std::move(elements_)));
            json_.set("values", Json(std::move(values_)));
            if (!unreadable_.empty()) json_.set("unreadable", Json(unreadable_));
            print_json(json_);
        } else if (same) {
            fmt::print("no difference in {}, {}{}\n", count_text(compared, "tensor"), size_text(bytes),
                       unreadable_.empty() ? "" : fmt::format("; {} not compared", unreadable_.size()));
        }
        return !same ? exit_faulty : unreadable_.empty() ? exit_sound : exit_trouble;
    }

   private:
    Output output_;
    Json json_;
    Json::Array only_in_a_;
    Json::Array only_in_b_;
    Json::Array kinds_;
    Json::Array elements_;
    Json::Array values_;
    Json::Array unreadable_;
};

void compare_values(const Values& a, const Values& b, Report& report) {
    for (const auto& [name, value] : a) {
        const auto other = b.find(name);
        if (other == b.end()) {
            report.only_in("A", name);
        } else if (!(value == other->second)) {
            report.value(name, value, other->second);
        }
    }
    for (const auto& [name, value] : b) {
        if (!a.contains(name)) report.only_in("B", name);
    }
}

// Reports names that both checkpoints have but that cannot be read in one of them. A name that only one has is reported
// only as that.
std::set<std::string, std::less<>> tell_unreadable(const Manifest& a, const Manifest& b, Report& report) {
    std::set<std::string, std::less<>> names;
    for (const Manifest* one : {&a, &b}) {
        for (const auto& [name, why] : one->unreadable) names.insert(name);
    }
    const auto why = [](const Manifest& manifest, const std::string& name) {
        const auto found = manifest.unreadable.find(name);
        return found == manifest.unreadable.end() ? nullptr : &found->second;
    };
    const auto has = [&](const Manifest& manifest, const std::string& name) {
        return manifest.find(name) != nullptr || manifest.values.contains(name) || why(manifest, name) != nullptr;
    };
    for (const std::string& name : names) {
        if (!has(a, name)) {
            report.only_in("B", name);
        } else if (!has(b, name)) {
            report.only_in("A", name);
        } else {
            report.unreadable(name, why(a, name), why(b, name));
        }
    }
    return names;
}

int compare(const std::string& path_a, const std::string& path_b, const Tolerance& tolerance, Output output) {
    const auto a = Checkpoint::open(path_a);
    const auto b = Checkpoint::open(path_b);
    Report report(*a, *b, output);
    const std::set<std::string, std::less<>> unreadable = tell_unreadable(a->manifest(), b->manifest(), report);
    const auto cannot_be_compared = [&](const auto& value) { return unreadable.contains(value.first); };
    std::vector<std::string> names;
    std::vector<TypedBox> boxes;
    int64_t bytes = 0;
    for (const std::string& name : a->names()) {
        const SavedTensor& of_a = *a->manifest().find(name);
        const SavedTensor* of_b = b->manifest().find(name);
        if (unreadable.contains(name)) continue;
        if (of_b == nullptr) {
            report.only_in("A", name);
        } else if (of_a.dtype != of_b->dtype || of_a.shape != of_b->shape) {
            report.kinds(name, of_a, *of_b);
        } else {
            names.push_back(name);
            boxes.push_back({Box::whole(of_a.shape), of_a.dtype});
            bytes += of_a.size_bytes();
        }
    }
    for (const std::string& name : b->names()) {
        if (a->manifest().find(name) == nullptr && !unreadable.contains(name)) report.only_in("B", name);
    }
    Values values_a = shown_values(a->manifest());
    Values values_b = shown_values(b->manifest());
    std::erase_if(values_a, cannot_be_compared);
    std::erase_if(values_b, cannot_be_compared);
    compare_values(values_a, values_b, report);

    const int64_t batch_bytes = default_batch_bytes / 2;  // there are two of them
    const auto room = static_cast<size_t>(largest_batch(boxes, batch_bytes));
    const AlignedBuffer memory_a(room);
    const AlignedBuffer memory_b(room);
    Progress progress("diff", bytes);
    Difference difference;
    size_t current = 0;
    const auto finish_until = [&](size_t index) {
        for (; current < index; ++current) {
            if (difference.differing() > 0) {
                report.elements(names[current], *a->manifest().find(names[current]), difference);
            }
            difference = Difference();
        }
    };
    for_each_batch(boxes, batch_bytes, [&](std::span<const BatchPart> parts, int64_t batch) {
        for (const auto& [checkpoint, memory] : {std::pair(a, &memory_a), std::pair(b, &memory_b)}) {
            std::vector<ReadPart> reads;
            for (const BatchPart& part : parts) {
                reads.push_back({names[part.index], part.box, memory->data() + part.begin});
            }
            checkpoint->read(reads);
        }
        for (const BatchPart& part : parts) {
            finish_until(part.index);
            difference.compare(memory_a.data() + part.begin, memory_b.data() + part.begin, boxes[part.index].dtype,
                               part.first, part.box.numel(), tolerance);
        }
        progress.add(batch);
    });
    finish_until(names.size());
    return report.finish(names.size(), bytes);
}

}  // namespace

void add_diff(Command& ckpt) {
    struct Arguments {
        std::string other;
        Tolerance tolerance;
    };
    const auto arguments = std::make_shared<Arguments>();
    Command command = add_command(ckpt, "diff", "Compare two checkpoints of any world sizes and layouts",
                                  checkpoint_path_what, [arguments](const std::string& path, Output output) {
                                      try {
                                          return compare(path, arguments->other, arguments->tolerance, output);
                                      } catch (const Error& error) {
                                          tell_error(error, output);  // never 1, which means that they differ
                                          return exit_trouble;
                                      }
                                  });
    command.add_option("other", arguments->other, "The second checkpoint").required();
    command.add_option("--atol", arguments->tolerance.absolute, "Ignore differences up to ATOL + RTOL * |second|")
        .not_negative();
    command.add_option("--rtol", arguments->tolerance.relative, "See --atol; both default to 0").not_negative();
    command.footer(
        "Exit codes:\n"
        "  0  no difference\n"
        "  1  the checkpoints differ\n"
        "  2  wrong usage, or a checkpoint does not exist, is damaged or cannot be read\n"
        "With --json standard output is one JSON document, {\"error\": {\"code\", \"message\"}} if the command "
        "failed.");
}

}  // namespace tsr::cli
