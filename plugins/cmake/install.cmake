# cmake --install: the library, the core's archive, their headers, and the package that find_package() reads.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package ${CMAKE_INSTALL_LIBDIR}/cmake/dflash_trt_plugins)
set(headers ${CMAKE_INSTALL_INCLUDEDIR}/dflash_trt_plugins)
install(TARGETS dflash_trt_plugins dflash_plugin_core EXPORT dflash_trt_plugins
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${headers})
install(EXPORT dflash_trt_plugins FILE dflash_trt_pluginsTargets.cmake NAMESPACE dflash_trt_plugins::
  DESTINATION ${package})
install(FILES common/export.h DESTINATION ${headers}/common)
foreach(header append check kernel numbers params reference)
  install(FILES kv_injection_attention/${header}.h DESTINATION ${headers}/kv_injection_attention)
endforeach()

# The package's version is the plugin's.
file(STRINGS kv_injection_attention/plugin.h version REGEX "kPluginVersion")
string(REGEX REPLACE ".*\"([0-9]+)\".*" "\\1" version "${version}")
file(CONFIGURE OUTPUT dflash_trt_pluginsConfig.cmake
  CONTENT "include(\${CMAKE_CURRENT_LIST_DIR}/dflash_trt_pluginsTargets.cmake)\n" @ONLY)
write_basic_package_version_file(dflash_trt_pluginsConfigVersion.cmake VERSION ${version} COMPATIBILITY ExactVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/dflash_trt_pluginsConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/dflash_trt_pluginsConfigVersion.cmake DESTINATION ${package})
install(FILES ../LICENSE ../NOTICE DESTINATION ${CMAKE_INSTALL_DOCDIR} OPTIONAL)
