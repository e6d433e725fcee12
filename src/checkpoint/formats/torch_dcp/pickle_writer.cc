#include "checkpoint/formats/torch_dcp/pickle_writer.hpp"

#include <openssl/bn.h>

#include <bit>
#include <limits>
#include <memory>

#include "base/base64.hpp"
#include "base/error.hpp"
#include "checkpoint/model/value.hpp"

namespace tsr::pickle {

void PickleWriter::number(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) text_ += static_cast<char>(value >> (8 * i));
}

void PickleWriter::integer(int64_t value) {
    if (value >= 0 && value < 256) {
        text_ += 'K';
        return number(static_cast<uint64_t>(value), 1);
    }
    if (value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max()) {
        text_ += 'J';
        return number(static_cast<uint64_t>(value), 4);
    }
    text_ += "\x8a\x08";
    number(static_cast<uint64_t>(value), 8);
}

void PickleWriter::real(double value) {
    text_ += 'G';
    const auto bits = std::bit_cast<uint64_t>(value);
    for (int i = 7; i >= 0; --i) text_ += static_cast<char>(bits >> (8 * i));
}

void PickleWriter::text(std::string_view value) {
    text_ += 'X';
    number(value.size(), 4);
    text_ += value;
}

void PickleWriter::bytes(std::string_view value) {
    // Protocol 2 has no bytes; Python writes them like this.
    global("_codecs", "encode");
    std::string characters;
    for (const char c : value) {
        const auto byte = static_cast<uint8_t>(c);
        if (byte < 0x80) {
            characters += c;
        } else {
            characters += static_cast<char>(0xc0 | byte >> 6);
            characters += static_cast<char>(0x80 | (byte & 0x3f));
        }
    }
    mark();
    text(characters);
    text("latin1");
    tuple();
    reduce();
}

void PickleWriter::global(std::string_view module, std::string_view name) {
    text_ += 'c';
    text_.append(module).append("\n").append(name).append("\n");
}

void PickleWriter::big_integer(std::string_view digits) {
    BIGNUM* parsed = nullptr;
    if (BN_dec2bn(&parsed, std::string(digits).c_str()) == 0)
        throw Error(Code::internal, "a value's integer is not a number");
    const std::unique_ptr<BIGNUM, decltype(&BN_free)> number_of(parsed, &BN_free);
    // Two's complement with room for the sign.
    std::string little(static_cast<size_t>(BN_num_bytes(parsed)) + 1, '\0');
    BN_bn2lebinpad(parsed, reinterpret_cast<unsigned char*>(little.data()), static_cast<int>(little.size()));
    if (BN_is_negative(parsed) != 0) {
        bool carry = true;
        for (char& c : little) {
            const auto inverted = static_cast<uint8_t>(~static_cast<uint8_t>(c));
            c = static_cast<char>(inverted + (carry ? 1 : 0));
            carry = carry && inverted == 0xff;
        }
    }
    if (little.size() < 256) {
        text_ += '\x8a';
        number(little.size(), 1);
    } else {
        text_ += '\x8b';
        number(little.size(), 4);
    }
    text_ += little;
}

void PickleWriter::typed(const Json& value) {
    const auto add_all = [&](const Json::Array& items) {
        for (const Json& item : items) typed(item);
    };
    switch (value.kind()) {
        case Json::Kind::null: return none();
        case Json::Kind::boolean: return boolean(value.as_bool());
        case Json::Kind::int64: return integer(value.as_int());
        case Json::Kind::number: return real(value.as_double());
        case Json::Kind::string: return text(value.as_string());
        case Json::Kind::array:
            empty_list();
            mark();
            add_all(value.as_array());
            return appends();
        case Json::Kind::object: break;
        case Json::Kind::uint64: throw Error(Code::internal, "a value has an unsigned integer");
    }
    const Json* tag = value.find("~");
    if (tag == nullptr) {
        empty_dict();
        mark();
        for (const Json::Member& member : value.as_object()) {
            text(member.key);
            typed(member.value);
        }
        return setitems();
    }
    const std::string& kind = tag->as_string();
    const Json& content = value.at("v");
    if (kind == "bytes") return bytes(from_base64(content.as_string()));
    if (kind == "int") return big_integer(content.as_string());
    if (kind == "double") return real(double_of(value, "a value"));
    if (kind == "tuple") {
        mark();
        add_all(content.as_array());
        return tuple();
    }
    empty_dict();
    mark();
    for (const Json& pair : content.as_array()) add_all(pair.as_array());
    setitems();
}

uint32_t PickleWriter::put() {
    const uint32_t index = stored_++;
    if (index < 256) {
        text_ += 'q';
        number(index, 1);
    } else {
        text_ += 'r';
        number(index, 4);
    }
    return index;
}

void PickleWriter::get(uint32_t index) {
    if (index < 256) {
        text_ += 'h';
        number(index, 1);
    } else {
        text_ += 'j';
        number(index, 4);
    }
}

std::string PickleWriter::finish() {
    text_ += '.';
    return std::move(text_);
}

}  // namespace tsr::pickle
