#include "base/json.hpp"

#include <fmt/core.h>
#include <simdjson.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstring>
#include <string_view>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/json_view.hpp"

namespace tsr {

namespace {

constexpr std::string_view kind_names[] = {"null",     "a boolean", "an integer", "an integer",
                                           "a number", "a string",  "an array",   "an object"};

[[noreturn]] void throw_kind(std::string_view expected, Json::Kind found) {
    throw Error(Code::corrupt, fmt::format("expected {}, found {}", expected, kind_names[static_cast<size_t>(found)]));
}

[[noreturn]] void throw_parse(std::string_view what, std::string_view why) {
    throw Error(Code::corrupt, fmt::format("{} is not valid JSON: {}", what, why));
}

[[noreturn]] void throw_missing(std::string_view key) {
    throw Error(Code::corrupt, fmt::format("the key \"{}\" is missing", key));
}

[[noreturn]] void throw_twice(std::string_view what, std::string_view key) {
    throw_parse(what, fmt::format("the key \"{}\" occurs twice", key));
}

// Detects duplicate keys of one object. Keys in order cost one comparison each; otherwise sorting takes n log n.
class KeyCheck {
   public:
    explicit KeyCheck(const std::string& what) : what_(what) {}
    void add(std::string_view key) {
        if (key <= last_ && count_ > 0) in_order_ = false;
        last_ = key;
        if (count_ < few_.size()) {
            few_[count_] = key;
        } else {
            if (count_ == few_.size()) many_.assign(few_.begin(), few_.end());
            many_.push_back(key);
        }
        ++count_;
    }
    // Throws CORRUPT if a key came twice.
    void finish() {
        if (in_order_) return;
        if (count_ > few_.size()) {
            std::sort(many_.begin(), many_.end());
            const auto twice = std::adjacent_find(many_.begin(), many_.end());
            if (twice != many_.end()) throw_twice(what_, *twice);
            return;
        }
        for (size_t i = 1; i < count_; ++i) {
            if (std::find(few_.begin(), few_.begin() + i, few_[i]) != few_.begin() + i) throw_twice(what_, few_[i]);
        }
    }

   private:
    const std::string& what_;
    std::string_view last_;
    bool in_order_ = true;
    size_t count_ = 0;
    std::array<std::string_view, 8> few_;
    std::vector<std::string_view> many_;
};

Json convert(simdjson::dom::element element, const std::string& what, int depth_left) {
    using simdjson::dom::element_type;
    if (depth_left < 0) throw_parse(what, "it is nested too deeply");
    switch (element.type()) {
        case element_type::NULL_VALUE: return {};
        case element_type::BOOL: return Json(element.get_bool().value_unsafe());
        case element_type::INT64: return Json(int64_t{element.get_int64().value_unsafe()});
        case element_type::UINT64: return Json(uint64_t{element.get_uint64().value_unsafe()});
        case element_type::DOUBLE: return Json(element.get_double().value_unsafe());
        case element_type::STRING: return Json(element.get_string().value_unsafe());
        case element_type::ARRAY: {
            const simdjson::dom::array items = element.get_array().value_unsafe();
            Json::Array array;
            array.reserve(items.size());
            for (const auto item : items) array.push_back(convert(item, what, depth_left - 1));
            return Json(std::move(array));
        }
        case element_type::OBJECT: {
            const simdjson::dom::object fields = element.get_object().value_unsafe();
            Json::Object members;
            members.reserve(fields.size());
            KeyCheck keys(what);
            for (const auto field : fields) {
                keys.add(field.key);
                members.push_back({std::string(field.key), convert(field.value, what, depth_left - 1)});
            }
            keys.finish();
            return Json(std::move(members));
        }
    }
    throw_parse(what, "unknown element");
}

}  // namespace

Json::Json(uint64_t value) {
    if (value <= static_cast<uint64_t>(INT64_MAX)) {
        value_ = static_cast<int64_t>(value);
    } else {
        value_ = value;
    }
}

Json::Json(Object value) : value_(std::move(value)) {}

Json Json::parse(std::string_view text, std::string_view what, int max_depth) {
    return JsonText(text, what, max_depth).root().tree(max_depth);
}

std::string Json::dump() const {
    std::string out;
    dump_to(out);
    return out;
}

void Json::dump_to(std::string& out) const {
    switch (kind()) {
        case Kind::null: out += "null"; return;
        case Kind::boolean: out += std::get<bool>(value_) ? "true" : "false"; return;
        case Kind::int64: out += std::to_string(std::get<int64_t>(value_)); return;
        case Kind::uint64: out += std::to_string(std::get<uint64_t>(value_)); return;
        case Kind::number: append_json_double(out, std::get<double>(value_)); return;
        case Kind::string: append_json_string(out, std::get<std::string>(value_)); return;
        case Kind::array: {
            out += '[';
            bool first = true;
            for (const Json& item : std::get<Array>(value_)) {
                if (!first) out += ',';
                first = false;
                item.dump_to(out);
            }
            out += ']';
            return;
        }
        case Kind::object: {
            out += '{';
            bool first = true;
            for (const Member& member : std::get<Object>(value_)) {
                if (!first) out += ',';
                first = false;
                append_json_string(out, member.key);
                out += ':';
                member.value.dump_to(out);
            }
            out += '}';
            return;
        }
    }
}

bool Json::as_bool() const {
    if (!is(Kind::boolean)) throw_kind("a boolean", kind());
    return std::get<bool>(value_);
}

int64_t Json::as_int() const {
    if (!is(Kind::int64)) throw_kind("an integer below 2^63", kind());
    return std::get<int64_t>(value_);
}

double Json::as_double() const {
    if (is(Kind::int64)) return static_cast<double>(std::get<int64_t>(value_));
    if (is(Kind::uint64)) return static_cast<double>(std::get<uint64_t>(value_));
    if (!is(Kind::number)) throw_kind("a number", kind());
    return std::get<double>(value_);
}

const std::string& Json::as_string() const {
    if (!is(Kind::string)) throw_kind("a string", kind());
    return std::get<std::string>(value_);
}

const Json::Array& Json::as_array() const {
    if (!is(Kind::array)) throw_kind("an array", kind());
    return std::get<Array>(value_);
}

const Json::Object& Json::as_object() const {
    if (!is(Kind::object)) throw_kind("an object", kind());
    return std::get<Object>(value_);
}

const Json* Json::find(std::string_view key) const {
    for (const Member& member : as_object()) {
        if (member.key == key) return &member.value;
    }
    return nullptr;
}

const Json& Json::at(std::string_view key) const {
    const Json* value = find(key);
    if (value == nullptr) throw_missing(key);
    return *value;
}

void Json::set(std::string_view key, Json value) {
    if (is(Kind::null)) value_ = Object{};
    std::get<Object>(value_).push_back({std::string(key), std::move(value)});
}

namespace {

// simdjson's choice of kernels is a static object that is destroyed at process exit while threads may still parse (a
// background save reads its lease). A parser uses that object once, to get its kernels. This object is created later
// and therefore destroyed first, and no parser may start once it is destroyed. It is created when the library is
// loaded, so that functions registered by the program for its exit run before its destruction.
class Kernels {
   public:
    class Use {
       public:
        Use() {
            ++users;
            if (!gone) return;
            --users;
            throw Error(Code::aborted, "the process is exiting");
        }
        ~Use() { --users; }
        Use(const Use&) = delete;
        Use& operator=(const Use&) = delete;
    };

    Kernels() noexcept { (void)simdjson::get_active_implementation()->name(); }
    ~Kernels() {
        gone = true;
        // In a forked child, the users may be threads of the parent.
        for (int round = 0; owner_ == ::getpid() && users > 0 && round < 1000; ++round) {
            std::this_thread::sleep_for(std::chrono::milliseconds{1});
        }
    }
    Kernels(const Kernels&) = delete;
    Kernels& operator=(const Kernels&) = delete;

   private:
    static inline std::atomic<bool> gone{false};
    static inline std::atomic<int> users{0};
    const pid_t owner_ = ::getpid();
};

const Kernels kernels;

}  // namespace

struct ParsedJson {
    std::string what;
    simdjson::dom::parser parser;
    simdjson::dom::element root;
};

namespace {

// Converts a place on the tape to simdjson's element and back. An element is just a tape_ref.
simdjson::dom::element element_at(const ParsedJson& parsed, size_t place) {
    return std::bit_cast<simdjson::dom::element>(simdjson::internal::tape_ref(&parsed.parser.doc, place));
}

size_t place_of(simdjson::dom::element element) {
    return std::bit_cast<simdjson::internal::tape_ref>(element).json_index;
}

}  // namespace

JsonText::JsonText(std::string_view text, std::string_view what, int max_depth) {
    auto parsed = std::make_unique<ParsedJson>();
    parsed->what = what;
    const simdjson::padded_string padded(text);
    // simdjson also counts the level of scalars; building a document checks the exact depth.
    const auto allocated = [&] {
        const Kernels::Use use;
        return parsed->parser.allocate(padded.size() + 1, static_cast<size_t>(max_depth) + 2);
    }();
    if (allocated) throw_parse(what, simdjson::error_message(allocated));
    if (const auto error = parsed->parser.parse(padded).get(parsed->root)) {
        throw_parse(what, simdjson::error_message(error));
    }
    parsed_ = std::move(parsed);
}

JsonText::~JsonText() = default;

JsonView JsonText::root() const { return {parsed_.get(), place_of(parsed_->root)}; }

namespace {

constexpr std::string_view blanks = " \t\n\r";

// Steps through the members of the object that opens at `at`, looking only at quotes, commas and brackets: parsing a
// member detects other faults.
class Members {
   public:
    Members(std::string_view text, size_t at) : text_(text), at_(at) {}

    // The position of the comma or bracket after the next member; npos if the text ends before.
    size_t next() {
        int depth = 0;
        while (++at_ < text_.size()) {
            switch (text_[at_]) {
                case '"':
                    at_ = closing_quote();
                    if (at_ == std::string_view::npos) return at_;
                    break;
                case '{':
                case '[': ++depth; break;
                case '}':
                case ']':
                    if (depth-- == 0) return at_;
                    break;
                case ',':
                    if (depth == 0) return at_;
                    break;
                default: break;
            }
        }
        return std::string_view::npos;
    }

   private:
    [[nodiscard]] size_t closing_quote() const {
        for (size_t quote = at_;;) {
            quote = text_.find('"', quote + 1);
            if (quote == std::string_view::npos) return quote;
            size_t slashes = 0;  // the opening quote ends their run
            while (text_[quote - 1 - slashes] == '\\') ++slashes;
            if (slashes % 2 == 0) return quote;
        }
    }

    std::string_view text_;
    size_t at_;
};

}  // namespace

void for_each_member_of(std::string_view text, std::string_view what,
                        FunctionRef<void(std::string_view key, JsonView value)> visit, size_t window_bytes) {
    const auto parse = [&](std::string_view object) {
        const JsonText json(object, what);
        json.root().for_each_of_any_key(visit);
    };
    const size_t open = text.find_first_not_of(blanks);
    if (open == std::string_view::npos || text[open] != '{')
        return parse(text);  // which reports the kind that it has instead
    Members members(text, open);
    for (size_t begin = open + 1;;) {
        size_t end = members.next();
        while (end != std::string_view::npos && text[end] == ',' && end - begin < window_bytes) end = members.next();
        if (end == std::string_view::npos) throw_parse(what, "it ends inside an object");
        const std::string_view window = text.substr(begin, end - begin);
        const bool is_last = text[end] != ',';
        const bool is_closed = text[end] == '}' && text.find_first_not_of(blanks, end + 1) == std::string_view::npos;
        if (is_last && !is_closed) throw_parse(what, "its brackets do not match");
        const bool is_blank = window.find_first_not_of(blanks) == std::string_view::npos;
        if (is_blank && !(is_last && begin == open + 1)) throw_parse(what, "a comma without a member");
        parse(fmt::format("{{{}}}", window));
        if (is_last) return;
        begin = end + 1;
    }
}

std::string_view object_in(std::string_view text, std::string_view key) {
    const size_t open = text.find_first_not_of(blanks);
    if (open == std::string_view::npos || text[open] != '{') return {};
    Members members(text, open);
    for (size_t begin = open + 1;;) {
        const size_t end = members.next();
        if (end == std::string_view::npos) return {};
        const std::string_view member = text.substr(begin, end - begin);
        const auto behind_blanks = [&](size_t at) {
            return std::min(member.find_first_not_of(blanks, at), member.size());
        };
        const size_t quote = behind_blanks(0);
        if (member.substr(quote).starts_with('"') && member.substr(quote + 1).starts_with(key) &&
            member.substr(quote + 1 + key.size()).starts_with('"')) {
            const size_t colon = behind_blanks(quote + key.size() + 2);
            const size_t value = behind_blanks(std::min(colon + 1, member.size()));
            const bool is_object =
                colon < member.size() && member[colon] == ':' && value < member.size() && member[value] == '{';
            return is_object ? member.substr(value) : std::string_view();
        }
        if (text[end] != ',') return {};
        begin = end + 1;
    }
}

namespace {

Json::Kind kind_of(simdjson::dom::element element) {
    using simdjson::dom::element_type;
    switch (element.type()) {
        case element_type::NULL_VALUE: return Json::Kind::null;
        case element_type::BOOL: return Json::Kind::boolean;
        case element_type::INT64: return Json::Kind::int64;
        case element_type::UINT64: return Json::Kind::uint64;
        case element_type::DOUBLE: return Json::Kind::number;
        case element_type::STRING: return Json::Kind::string;
        case element_type::ARRAY: return Json::Kind::array;
        case element_type::OBJECT: return Json::Kind::object;
    }
    return Json::Kind::null;  // not reached: these are all
}

simdjson::dom::array array_of(simdjson::dom::element element) {
    if (!element.is_array()) throw_kind("an array", kind_of(element));
    return element.get_array().value_unsafe();
}

simdjson::dom::object object_of(simdjson::dom::element element) {
    if (!element.is_object()) throw_kind("an object", kind_of(element));
    return element.get_object().value_unsafe();
}

}  // namespace

Json::Kind JsonView::kind() const { return kind_of(element_at(*parsed_, place_)); }

int64_t JsonView::as_int() const {
    int64_t value = 0;
    if (element_at(*parsed_, place_).get_int64().get(value) != simdjson::SUCCESS)
        throw_kind("an integer below 2^63", kind());
    return value;
}

std::string_view JsonView::as_string() const {
    std::string_view text;
    if (element_at(*parsed_, place_).get_string().get(text) != simdjson::SUCCESS) throw_kind("a string", kind());
    return text;
}

void JsonView::for_each_item(FunctionRef<void(JsonView item)> visit) const {
    for (const auto item : array_of(element_at(*parsed_, place_))) visit({parsed_, place_of(item)});
}

void JsonView::for_each_of_any_key(FunctionRef<void(std::string_view key, JsonView value)> visit) const {
    for (const auto field : object_of(element_at(*parsed_, place_))) {
        visit(field.key, {parsed_, place_of(field.value)});
    }
}

void JsonView::for_each_member(FunctionRef<void(std::string_view key, JsonView value)> visit) const {
    KeyCheck keys(parsed_->what);
    for (const auto field : object_of(element_at(*parsed_, place_))) {
        keys.add(field.key);
        visit(field.key, {parsed_, place_of(field.value)});
    }
    keys.finish();
}

void JsonView::find(std::span<const std::string_view> asked, std::span<size_t> places) const {
    KeyCheck keys(parsed_->what);
    for (const auto field : object_of(element_at(*parsed_, place_))) {
        keys.add(field.key);
        for (size_t i = 0; i < asked.size(); ++i) {
            if (asked[i] == field.key) places[i] = place_of(field.value);
        }
    }
    keys.finish();
}

size_t JsonView::size() const {
    const auto element = element_at(*parsed_, place_);
    return element.is_array() ? array_of(element).size() : object_of(element).size();
}

Json JsonView::tree(int max_depth) const { return convert(element_at(*parsed_, place_), parsed_->what, max_depth); }

JsonView JsonView::missing(std::string_view key) { throw_missing(key); }

bool operator==(const Json& a, const Json& b) { return a.value_ == b.value_; }

// Not simdjson's function, which uses an object that is already destroyed while the process exits.
bool is_utf8(std::string_view text) {
    struct Lead {
        unsigned mask;
        unsigned bits;
        uint32_t least;  // a smaller code point has a shorter form
    };
    static constexpr std::array<Lead, 3> leads{{{0xe0, 0xc0, 0x80}, {0xf0, 0xe0, 0x800}, {0xf8, 0xf0, 0x10000}}};
    constexpr uint64_t high_bits = 0x8080808080808080;
    for (size_t at = 0; at < text.size();) {
        const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
        if (uint64_t eight = 0; text.size() - at >= sizeof eight) {
            std::memcpy(&eight, text.data() + at, sizeof eight);
            if ((eight & high_bits) == 0) {
                at += sizeof eight;
                continue;
            }
        }
        if (byte(at) < 0x80) {
            ++at;
            continue;
        }
        size_t more = 0;
        while (more < leads.size() && (byte(at) & leads[more].mask) != leads[more].bits) ++more;
        if (more == leads.size() || text.size() - at < more + 2) return false;
        uint32_t point = byte(at) & ~leads[more].mask;
        for (size_t i = at + 1; i < at + more + 2; ++i) {
            if ((byte(i) & 0xc0) != 0x80) return false;
            point = point << 6 | (byte(i) & 0x3f);
        }
        const bool is_surrogate = point >= 0xd800 && point < 0xe000;
        if (point < leads[more].least || point > 0x10ffff || is_surrogate) return false;
        at += more + 2;
    }
    return true;
}

void append_json_string(std::string& out, std::string_view text) {
    out += '"';
    append_json_escaped(out, text);
    out += '"';
}

void append_json_escaped(std::string& out, std::string_view text) {
    if (!is_utf8(text)) throw Error(Code::invalid_argument, "cannot write text that is not UTF-8 as JSON");
    // Runs of plain characters are copied at once: headers hold a million names.
    size_t plain = 0;
    for (size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (c != '"' && c != '\\' && static_cast<unsigned char>(c) >= 0x20) continue;
        out.append(text, plain, i - plain);
        plain = i + 1;
        switch (c) {
            case '"': out += "\\\""; break;
            case '\\': out += "\\\\"; break;
            case '\n': out += "\\n"; break;
            case '\r': out += "\\r"; break;
            case '\t': out += "\\t"; break;
            default: out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
        }
    }
    out.append(text, plain);
}

void append_json_double(std::string& out, double value) {
    if (!std::isfinite(value)) throw Error(Code::invalid_argument, "JSON does not support NaN or infinities");
    char digits[40];
    const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
    const std::string_view text(digits, static_cast<size_t>(end - digits));
    out += text;
    if (text.find_first_of(".e") == std::string_view::npos) out += ".0";
}

std::string readable_utf8(std::string_view text) {
    if (is_utf8(text)) return std::string(text);
    constexpr size_t longest = 4;
    std::string out;
    while (!text.empty()) {
        size_t size = 1;
        while (size <= std::min(longest, text.size()) && !is_utf8(text.substr(0, size))) ++size;
        const bool found = size <= std::min(longest, text.size());
        out += found ? text.substr(0, size) : "?";
        text.remove_prefix(found ? size : 1);
    }
    return out;
}

}  // namespace tsr
