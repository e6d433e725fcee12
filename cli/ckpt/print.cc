#include "ckpt/print.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <iterator>

#include "base/brief.hpp"
#include "base/error.hpp"
#include "checkpoint/formats/safetensors/files.hpp"
#include "ckpt/command.hpp"
#include "ckpt/elements.hpp"

namespace tsr::cli {

std::string size_text(int64_t bytes) {
    constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    auto value = static_cast<double>(bytes);
    size_t unit = 0;
    while (value >= 1023.5 && unit + 1 < std::size(units)) {
        value /= 1024;
        ++unit;
    }
    if (unit == 0) return fmt::format("{} B", bytes);
    return value < 9.95 ? fmt::format("{:.1f} {}", value, units[unit]) : fmt::format("{:.0f} {}", value, units[unit]);
}

std::string count_text(size_t n, std::string_view one) {
    if (n == 1) return fmt::format("1 {}", one);
    if (one.ends_with('y')) return fmt::format("{} {}ies", n, one.substr(0, one.size() - 1));
    return fmt::format("{} {}{}", n, one, one.ends_with('s') ? "es" : "s");
}

std::string time_text(const std::string& committed) {
    // "2026-11-21T09:02:11.123Z"
    constexpr size_t to_seconds = 19;
    if (committed.size() <= to_seconds || committed[10] != 'T' || committed.back() != 'Z') return printable(committed);
    return printable(fmt::format("{} {} UTC", committed.substr(0, 10), committed.substr(11, to_seconds - 11)));
}

std::string metric_text(const Json& value) {
    try {
        return fmt::format("{:.4g}", double_of(value, "metric"));
    } catch (const Error&) {
        return printable(value.dump());
    }
}

size_t width_of(std::string_view text) {
    // Continuation bytes take no column.
    return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

int rank_of_file(const std::string& name) {
    if (const int rank = rank_of_shard_name(name); rank >= 0) return rank;
    int rank = -1;
    const size_t digits = name.starts_with("rank-") ? 5 : name.starts_with("__") ? 2 : name.size();
    std::from_chars(name.data() + digits, name.data() + name.size(), rank);
    return rank;
}

namespace {

// A value that an f32 can hold mostly was one, and is printed as short as one.
std::string double_text(double value) {
    const auto narrow = static_cast<float>(value);
    return with_point(static_cast<double>(narrow) == value ? fmt::format("{}", narrow) : fmt::format("{}", value));
}

void append_value(std::string& out, const Json& value, size_t enough) {
    const auto list = [&](const Json::Array& items, char open, char close, auto&& append) {
        out += open;
        for (size_t i = 0; i < items.size() && out.size() < enough; ++i) {
            if (i > 0) out += ", ";
            append(items[i]);
        }
        out += close;
    };
    const auto append = [&](const Json& item) { append_value(out, item, enough); };
    if (value.is(Json::Kind::number)) {
        out += double_text(value.as_double());
    } else if (value.is(Json::Kind::array)) {
        list(value.as_array(), '[', ']', append);
    } else if (!value.is(Json::Kind::object)) {
        out += value.dump();
    } else if (const Json* kind = value.find("~"); kind == nullptr) {
        out += '{';
        for (size_t i = 0; i < value.as_object().size() && out.size() < enough; ++i) {
            const Json::Member& member = value.as_object()[i];
            if (i > 0) out += ", ";
            out += Json(member.key).dump() + ": ";
            append(member.value);
        }
        out += '}';
    } else if (const Json& content = value.at("v"); kind->as_string() == "tuple") {
        list(content.as_array(), '(', ')', append);
    } else if (kind->as_string() == "map") {
        list(content.as_array(), '{', '}', [&](const Json& pair) {
            append(pair.as_array().at(0));
            out += ": ";
            append(pair.as_array().at(1));
        });
    } else if (kind->as_string() == "bytes") {
        const std::string& base64 = content.as_string();
        const auto padding = static_cast<size_t>(std::count(base64.begin(), base64.end(), '='));
        out += count_text(base64.size() / 4 * 3 - padding, "byte");
    } else {
        out += content.as_string();  // an integer of more than 64 bits, NaN or an infinity
    }
}

}  // namespace

std::string value_text(const Json& value) {
    constexpr size_t most = 60;
    std::string text;
    append_value(text, value, 4 * most);
    return brief(printable(text), most);
}

Values shown_values(const Manifest& manifest) {
    Values values = manifest.values;
    std::erase_if(values, [](const auto& named) { return is_torch_record(named.first, named.second); });
    return values;
}

Json values_json(const Values& values) {
    Json::Object members;
    for (const auto& [name, value] : values) members.push_back({name, value});
    return Json(std::move(members));
}

Json unreadable_json(const std::map<std::string, std::string, std::less<>>& unreadable) {
    Json::Object members;
    for (const auto& [name, why] : unreadable) members.push_back({name, why});
    return Json(std::move(members));
}

int tell_unreadable(const std::map<std::string, std::string, std::less<>>& unreadable) {
    for (const auto& [name, why] : unreadable) complain(fmt::format("'{}' was left out: {}", name, why));
    return unreadable.empty() ? exit_sound : exit_faulty;
}

Json summary_json(const Checkpoint& checkpoint) {
    const Manifest& manifest = checkpoint.manifest();
    Json json;
    json.set("path", checkpoint.path());
    json.set("format", manifest.format);
    json.set("step", manifest.step < 0 ? Json() : Json(manifest.step));  // not recorded by PyTorch's formats
    json.set("sequence", manifest.sequence);
    json.set("save_id", manifest.save_id);
    json.set("committed", manifest.committed);
    Json writer;
    writer.set("library", manifest.writer.library);
    writer.set("language", manifest.writer.language);
    writer.set("version", manifest.writer.version);
    json.set("writer", std::move(writer));
    json.set("world_size", manifest.world_size);
    json.set("tensor_count", static_cast<int64_t>(checkpoint.names().size()));
    json.set("size_bytes", manifest.size_bytes());
    json.set("metrics", values_json(manifest.metrics));
    return json;
}

void print_json(const Json& json) { fmt::print("{}\n", json.dump()); }

void complain(std::string_view message) { fmt::print(stderr, "tessera ckpt: {}", printable_lines(message)); }

ObjectText::ObjectText(const Json& first_members) : text_(first_members.dump()), open_("{") { text_.pop_back(); }

void ObjectText::comma() {
    if (text_.back() != '{' && text_.back() != '[') text_ += ',';
}

void ObjectText::add(std::string_view key) {
    comma();
    append_json_string(text_, key);
    text_ += ':';
}

void ObjectText::member(std::string_view key, const Json& value) {
    add(key);
    value.dump_to(text_);
}

void ObjectText::member(std::string_view key, std::string_view text) {
    add(key);
    append_json_string(text_, text);
}

void ObjectText::member(std::string_view key, int64_t number) {
    add(key);
    fmt::format_to(std::back_inserter(text_), "{}", number);
}

void ObjectText::member(std::string_view key, const Dims& numbers) {
    add(key);
    fmt::format_to(std::back_inserter(text_), "[{}]", fmt::join(numbers.begin(), numbers.end(), ","));
}

void ObjectText::open(std::string_view key, char bracket) {
    add(key);
    text_ += bracket;
    open_ += bracket;
}

void ObjectText::begin_item() {
    comma();
    text_ += '{';
    open_ += '{';
}

void ObjectText::end() {
    text_ += open_.back() == '{' ? '}' : ']';
    open_.pop_back();
}

std::string ObjectText::take() {
    std::string text(1, text_.back());  // stays: it says whether a comma comes next
    text_.pop_back();
    text_.swap(text);
    return text;
}

std::string ObjectText::finish() {
    end();
    text_ += '\n';
    return std::move(text_);
}

void Table::column(std::string heading, Align align) {
    headings_.push_back(std::move(heading));
    aligns_.push_back(align);
}

void Table::row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }

void Table::print() const {
    std::vector<size_t> widths;
    for (const std::string& heading : headings_) widths.push_back(width_of(heading));
    for (const auto& row : rows_) {
        for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width_of(row[i]));
    }
    print_row(headings_, widths);
    for (const auto& row : rows_) print_row(row, widths);
}

void Table::print_row(const std::vector<std::string>& cells, const std::vector<size_t>& widths) const {
    std::string line;
    for (size_t i = 0; i < cells.size(); ++i) {
        if (i > 0) line += "  ";
        const std::string padding(widths[i] - width_of(cells[i]), ' ');
        line += aligns_[i] == Align::right ? padding + cells[i] : cells[i] + padding;
    }
    while (!line.empty() && line.back() == ' ') line.pop_back();
    fmt::print("{}\n", line);
}

}  // namespace tsr::cli
