// What is fuzzed: each target takes any bytes for one of the formats that are read from files or from a connection, walks
// whatever was accepted, and lets nothing out but the two or three kinds of Error that damaged or foreign input may give. `./dev fuzz` gives them to
// libFuzzer; the ordinary tests replay the corpus and mutate it at random.
#pragma once

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "base/json.hpp"
#include "checkpoint/formats/native/rank_file.hpp"
#include "checkpoint/formats/safetensors/files.hpp"
#include "checkpoint/formats/safetensors/header.hpp"
#include "checkpoint/formats/torch_dcp/metadata.hpp"
#include "checkpoint/formats/torch_dcp/torch_archive.hpp"
#include "checkpoint/model/manifest.hpp"
#include "checkpoint/model/runs.hpp"
#include "store/handshake.hpp"
#include "store/wire.hpp"

namespace tsr::fuzz {

// A file that is a string.
class MemoryFile final : public File {
   public:
    explicit MemoryFile(std::string_view content) : content_(content) {}
    int64_t read(std::span<std::byte> into, int64_t offset) override {
        const auto at = std::min(static_cast<size_t>(offset), content_.size());
        const size_t count = std::min(into.size(), content_.size() - at);
        if (count > 0) std::memcpy(into.data(), content_.data() + at, count);
        return static_cast<int64_t>(count);
    }
    int64_t write(std::span<const std::byte>, int64_t) override { return -EROFS; }
    int64_t size() override { return static_cast<int64_t>(content_.size()); }
    int64_t allocate(int64_t) override { return -EROFS; }
    int64_t truncate(int64_t) override { return -EROFS; }
    int64_t sync() override { return 0; }
    void start_writeback(int64_t, int64_t) override {}
    bool is_direct() const override { return false; }
    int64_t leave_direct() override { return 0; }
    bool is_cached(int64_t) override { return true; }

   private:
    std::string_view content_;
};

// In part: it is taken, but a tensor or a value of it is refused, alone.
enum class Outcome { taken, in_part, refused };

template <class Body>
Outcome attempt(Body&& body) {
    try {
        body();
        return Outcome::taken;
    } catch (const Error& error) {
        const bool typed =
            error.code() == Code::corrupt || error.code() == Code::unsupported || error.code() == Code::version;
        if (!typed || std::string_view(error.what()).empty()) std::abort();
        return Outcome::refused;
    }
}

inline Outcome zip(std::string_view bytes) {
    return attempt([&] {
        MemoryFile file(bytes);
        const std::string path = "f";
        PartReader part(file, path, 0, file.size());
        const ZipArchive archive = ZipArchive::read(part);
        for (const ZipEntry& entry : archive.entries()) {
            if (archive.find(entry.name) == nullptr) std::abort();
            const int64_t begin = archive.data_begin(part, entry);
            if (begin < 0 || entry.size < 0 || begin + entry.size > file.size()) std::abort();
            (void)archive.read_entry(part, entry, 1 << 20);
        }
    });
}

// `whole`, unless that is taken and some part of it is not.
inline Outcome with_parts(Outcome whole, bool all_parts) {
    return whole == Outcome::taken && !all_parts ? Outcome::in_part : whole;
}

inline bool is_value(const pickle::Tree& tree) {
    int64_t budget = static_cast<int64_t>(tree.size_bytes()) * value_bytes_per_byte + 1024;
    return attempt([&] { (void)value_of(tree, tree.root(), budget).dump(); }) == Outcome::taken;
}

inline Outcome pickle(std::string_view bytes) {
    bool all = true;
    const Outcome whole = attempt([&] { all = is_value(pickle::Tree::parse(std::string(bytes), "p")); });
    return with_parts(whole, all);
}

// A whole torch.save archive, its tensors looked at wherever they stand in it.
inline Outcome archive(std::string_view bytes) {
    bool all = true;
    const Outcome whole = attempt([&] {
        MemoryFile file(bytes);
        const std::string path = "f";
        PartReader part(file, path, 0, file.size());
        const TorchArchive archive(part);
        const pickle::Tree& tree = archive.tree();
        (void)is_value(tree);
        std::vector<pickle::Ref> nodes{tree.root()};
        if (tree.is(tree.root(), pickle::Kind::dict))
            nodes.assign(tree.items(tree.root()).begin(), tree.items(tree.root()).end());
        for (const pickle::Ref node : nodes) {
            if (!TorchArchive::is_tensor(tree, node)) continue;
            const Outcome read = attempt([&] {
                const StoredTensor tensor = archive.tensor(node);
                if (tensor.entry == nullptr || tensor.shape.product() == 0) return;
                const Box box = Box::whole(tensor.shape);
                const auto item = static_cast<int64_t>(size_of(tensor.dtype));
                const Runs runs(box, {&box, &tensor.strides, tensor.dtype, tensor.first * item},
                                {&box, tensor.dtype, nullptr});
                if (runs.begin() < 0 || runs.end() > tensor.entry->size) std::abort();
            });
            all = all && read == Outcome::taken;
        }
    });
    return with_parts(whole, all);
}

inline Outcome metadata(std::string_view bytes) {
    bool all = true;
    const Outcome whole = attempt([&] {
        const DcpMetadata metadata = DcpMetadata::parse(std::string(bytes), "m");
        all = metadata.unreadable.empty();
        for (const std::string& file : metadata.files) {
            if (file.front() == '/' || ("/" + file + "/").find("/../") != std::string::npos) std::abort();
        }
        for (const auto& [name, tensor] : metadata.tensors) {
            for (const DcpChunk& chunk : tensor.chunks) {
                if (!chunk.box.inside(tensor.shape)) std::abort();
                if (static_cast<size_t>(chunk.item.file) >= metadata.files.size()) std::abort();
            }
        }
        // What was taken is written the same again.
        const std::string text = metadata.dump();
        if (DcpMetadata::parse(text, "m").tensors.size() != metadata.tensors.size()) std::abort();
    });
    return with_parts(whole, all);
}

// The header of a rank file: an empty save id is that of no file, so the id is taken from the text where it is found.
inline Outcome safetensors(std::string_view bytes) {
    return attempt([&] {
        const size_t at = bytes.find("save_id");
        const size_t id = at == std::string_view::npos ? at : bytes.find_first_of("0123456789abcdef", at + 7);
        const std::string_view save_id = id == std::string_view::npos ? "" : bytes.substr(id, 36);
        const int64_t size = static_cast<int64_t>(bytes.size()) + 28;
        const RankFile file = RankFile::parse(bytes, "f", size, save_id);
        for (const FileEntry& entry : file.entries()) {
            if (entry.begin < 0 || entry.end < entry.begin || entry.end > file.data_bytes()) std::abort();
        }
    });
}

// The checksum is made right, so that what stands before it is looked at.
inline Outcome manifest(std::string_view bytes) {
    for (const auto part : {+[](std::string_view text) { (void)parse_manifest_head(text); },
                            +[](std::string_view text) { (void)parse_manifest_language(text); },
                            +[](std::string_view text) { (void)parse_manifest_metrics(text); }}) {
        (void)attempt([&] { part(bytes); });  // what is read of a manifest without the whole
    }
    return attempt([&] {
        std::string text(bytes.substr(0, bytes.rfind("\"crc32c\"")));
        text += "\"crc32c\":\"" + hex8(crc32c(text)) + "\"}\n";
        const Manifest manifest = Manifest::parse(text, "m");
        for (const auto& [name, tensor] : manifest.tensors) {
            tensor->for_each_piece(Box::whole(tensor->shape), [&, &shape = tensor->shape](const Box& box, int index) {
                if (!box.inside(shape) || static_cast<size_t>(index) >= manifest.files.size()) std::abort();
            });
        }
    });
}

// A safetensors file of anyone's, whole: the data is there too.
inline Outcome safetensors_file(std::string_view bytes) {
    bool all = true;
    const Outcome whole = attempt([&] {
        MemoryFile file(bytes);
        const SafetensorsHeader header = SafetensorsHeader::read(file, "f");
        for (const SafetensorsEntry& entry : header.entries()) {
            if (entry.begin < 0 || entry.end < entry.begin) std::abort();
            if (header.data_begin() + entry.end > file.size() || header.find(entry.name) != &entry) std::abort();
            all = all && entry.unreadable.empty();
            if (!entry.unreadable.empty()) continue;
            const Box box = entry.box();
            if (box.numel() * static_cast<int64_t>(size_of(entry.dtype)) != entry.end - entry.begin) std::abort();
            for (int d = 0; d < box.sizes.ndim(); ++d) {
                if (box.offsets[d] < 0 || box.offsets[d] + box.sizes[d] < box.offsets[d]) std::abort();
            }
        }
        for (const auto& [name, target] : header.tied()) {
            if (header.find(name) != nullptr || header.find(target) == nullptr) std::abort();
        }
    });
    return with_parts(whole, all);
}

// No file that an index names can lie elsewhere than beside it.
inline Outcome safetensors_index(std::string_view bytes) {
    return attempt([&] {
        const SafetensorsIndex index = SafetensorsIndex::parse(bytes, "i");
        for (const std::string& file : index.files()) {
            if (file.empty() || file == "." || file == ".." || file.size() > 255) std::abort();
            if (file.find('/') != std::string::npos || file.find('\0') != std::string::npos) std::abort();
        }
        for (const auto& [tensor, file] : index.weight_map) {
            if (tensor.empty() || !is_utf8(tensor)) std::abort();
        }
    });
}

// What a client sends after the handshake: one request.
inline Outcome store_request(std::string_view bytes) {
    return attempt([&] {
        std::string_view rest = bytes;
        const auto frame = wire::take_frame(rest, wire::max_request);
        if (!frame || !rest.empty()) throw Error(Code::corrupt, "not one request");
        const wire::Request request = wire::decode(*frame);
        const auto inside = [&](std::string_view part) {
            if (part.data() < bytes.data() || part.data() + part.size() > bytes.data() + bytes.size()) std::abort();
        };
        inside(request.key);
        if (!request.value.empty()) inside(request.value);
        if (request.expected) inside(*request.expected);
        // Another byte than 1 may say that there is an expected value.
        if (wire::encode(request).size() != bytes.size()) std::abort();
    });
}

// Both ends of the handshake, each given any bytes by the other. Taken: the hello of a client of this version and mode.
inline Outcome store_hello(std::string_view bytes) {
    static const handshake::Party party;
    std::string padded(bytes);
    padded.resize(std::max(bytes.size(), handshake::hello_size + handshake::proof_size));
    const auto part = [&](size_t begin, size_t size) { return std::string_view(padded).substr(begin, size); };
    try {
        (void)handshake::Client(party, "fuzz").prove(part(0, handshake::answer_size));
        std::abort();  // it had the token
    } catch (const Error& error) {
        if (error.code() != Code::permission && error.code() != Code::version) std::abort();
    }
    return attempt([&] {
        if (!handshake::Server::plausible(bytes) || bytes.size() < handshake::hello_size) {
            throw Error(Code::corrupt, "not a hello");
        }
        handshake::Server server(party);
        if (server.answer(part(0, handshake::hello_size)).size() != handshake::answer_size) std::abort();
        if (!server.refusal().empty()) throw Error(Code::version, server.refusal());
        if (server.judge(part(handshake::hello_size, handshake::proof_size)) != handshake::Verdict::wrong_token) {
            std::abort();
        }
    });
}

struct Target {
    const char* name;
    Outcome (*run)(std::string_view bytes);
};
inline constexpr Target targets[] = {{"zip", zip},
                                     {"pickle", pickle},
                                     {"archive", archive},
                                     {"metadata", metadata},
                                     {"safetensors", safetensors},
                                     {"manifest", manifest},
                                     {"safetensors_file", safetensors_file},
                                     {"safetensors_index", safetensors_index},
                                     {"store_request", store_request},
                                     {"store_hello", store_hello}};

}  // namespace tsr::fuzz
