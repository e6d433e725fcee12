// The file by which a failing rank tells its agent why: torchelastic's JSON, so that PyTorch's @record and Tessera's
// bindings write the same and either launcher understands it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tsr {

struct RecordedError {
    std::string message;
    std::string traceback;
    double timestamp = 0;  // seconds since 1970
};

// Writes the file that TESSERA_ERROR_FILE or TORCHELASTIC_ERROR_FILE names, if any. The first call of the process
// counts. Throws IO.
void record_error(std::string_view message, std::string_view traceback);

// nullopt if there is no such file or it is no such JSON: a dying rank may have written half of it.
[[nodiscard]] std::optional<RecordedError> read_error_file(const std::string& path);

}  // namespace tsr
