// This process's environment as a map that later settings override, for a process that it starts.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tsr {

class Variables {
   public:
    Variables();
    void set(const std::string& name, std::string value) { values_[name] = std::move(value); }
    void set(const std::string& name, int64_t value) { values_[name] = std::to_string(value); }
    void set_default(const std::string& name, std::string value) { values_.try_emplace(name, std::move(value)); }
    void erase(const std::string& name) { values_.erase(name); }
    [[nodiscard]] std::vector<std::string> entries() const;  // "K=V"

   private:
    std::map<std::string, std::string> values_;
};

}  // namespace tsr
